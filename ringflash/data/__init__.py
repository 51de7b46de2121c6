"""Text as packed tokens: found, made ready once, split by document, read a few rows at a time. numpy only."""
from .corpus import Corpus, Split, load_corpus
from .entropy import unigram_entropy
from .formats import Reading, format_of
from .mixture import MixedDataset
from .packing import LazyTokens, PackedDataset, split_documents
from .prepared import Prepared, cached, is_prepared, open_prepared, prepare
from .sources import Source, find_source
from .tokens import DOCUMENT_START, VOCAB_SIZE

__all__ = ["DOCUMENT_START", "VOCAB_SIZE", "Corpus", "LazyTokens", "MixedDataset", "PackedDataset", "Prepared", "Reading", "Source",
           "Split", "cached", "find_source", "format_of", "is_prepared", "load_corpus", "open_prepared", "prepare",
           "split_documents", "unigram_entropy"]
