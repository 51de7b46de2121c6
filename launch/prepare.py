"""Makes a text ready for training, once: `python launch/prepare.py SOURCE... -o FOLDER`, then `data.path=FOLDER`.

Reads text, jsonl, parquet and .bin, and writes the tokens as one file that training maps into memory, with an index of the documents. The folder
appears when it is whole, and not before; one that is there already is refused.
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__" and not __package__ and (ROOT / "pyproject.toml").is_file():
    sys.path[0] = str(ROOT)                 # run as a file: the checkout, not launch/, is the import root

from ringflash.data import Reading, find_source, open_prepared, prepare
from ringflash.data.formats import BIN_DTYPES, FORMATS


def main(argv: list[str] | None = None) -> int:
    """Returns 0, or 2 for a source that cannot be prepared, which stderr names."""
    parser = argparse.ArgumentParser(prog="ringflash prepare", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("source", nargs="+", help="files, globs or folders")
    parser.add_argument("-o", "--output", required=True, help="the folder to write, which must not exist")
    parser.add_argument("--pattern", default="**/*", help="which files under a folder (default **/*)")
    parser.add_argument("--format", default="auto", choices=("auto", *FORMATS), help="auto: by the files' endings")
    parser.add_argument("--text-field", default="text", help="of a jsonl's records, or the column of a parquet file")
    parser.add_argument("--tokenizer", default="bytes", help="bytes, or the path of a tokenizer.json")
    parser.add_argument("--document-start", help="the tokenizer.json's token that begins each document")
    parser.add_argument("--bin-dtype", default="uint16", choices=BIN_DTYPES, help="of a .bin without a header")
    parser.add_argument("--bin-document-start", type=int, help="the token that begins each document of a .bin")
    parser.add_argument("--heldout-fraction", type=float, default=0.05, help="of the documents (default 0.05)")
    parser.add_argument("--max-bytes", type=int, help="read no more than this")
    given = parser.parse_args(argv)
    options = {name: value for name, value in vars(given).items() if name in Reading.__dataclass_fields__}
    try:
        if not 0 < given.heldout_fraction < 1:
            raise ValueError(f"--heldout-fraction {given.heldout_fraction}: must lie between 0 and 1")
        if Path(given.output).exists():
            raise ValueError(f"{given.output}: is there already; name another folder, or remove it")
        source = find_source(given.source[0] if len(given.source) == 1 else given.source, pattern=given.pattern)
        made = open_prepared(prepare(source, given.output, Reading(**options)))
    except (ValueError, OSError) as error:
        print(f"ringflash prepare: {error}", file=sys.stderr)
        return 2
    train, heldout = made.corpus.train, made.corpus.heldout
    print(f"{given.output}: {len(train.tokens):,} tokens in {train.num_documents:,} documents, held out {len(heldout.tokens):,} in "
          f"{heldout.num_documents:,}\ntrain with: data.path={given.output} model.vocab_size={made.num_ids}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
