"""Claims about the source tree itself: direction of imports, notes that exist, plain text, readable sizes."""
import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = [p for d in ("ringflash", "kernels", "launch", "tests") for p in sorted((ROOT / d).rglob("*.py"))]
NOTE = re.compile(r"Note \[([^\]\n]+)\]")

# Layers from the bottom up: a module may import its own layer and those below it.
ALLOWED = {
    "kernels": set(),
    "ring": {"kernels", "mask", "layout"},
    "model": {"loss", "token_loss", "rotary", "config", "hf_config", "hf_attention"},
    "hf_config": {"config", "mask"},
    "hf_attention": {"hf_config", "mask"},
    "loss": set(),
    "token_loss": {"loss"},
    "rotary": set(),
    "data": set(),
}


def imports(path: Path) -> set[str]:
    """Absolute names of the modules that a file imports (relative imports resolved against ringflash)."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    package = list(parts[:-1]) if parts[0] == "ringflash" else ["ringflash", *parts[:-1]]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, node.module] if node.module else base)
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


def layer_files(layer: str) -> list[Path]:
    return [p for p in CODE if p.relative_to(ROOT).parts[0] == layer
            or p.relative_to(ROOT).as_posix() in (f"ringflash/{layer}.py",)
            or p.relative_to(ROOT).as_posix().startswith(f"ringflash/{layer}/")]


@pytest.mark.parametrize("layer", sorted(ALLOWED))
def test_each_layer_imports_only_what_lies_below_it(layer):
    files = layer_files(layer)
    assert files
    for path in files:
        for name in imports(path):
            if name.startswith("ringflash."):
                target = name.split(".")[1]
                assert target == layer or target in ALLOWED[layer], f"{path.relative_to(ROOT)} imports {name}"


def test_kernels_import_torch_triton_and_the_standard_library_only():
    for path in layer_files("kernels"):
        for name in imports(path):
            top = name.split(".")[0]
            assert top in {"torch", "triton", "ringflash", "__future__"} or top in sys.stdlib_module_names, f"{path.name}: {name}"
            assert top != "ringflash" or name.startswith("ringflash.kernels"), f"{path.name}: {name}"


@pytest.mark.parametrize("layer", ["model", "loss", "token_loss"])
def test_model_code_never_imports_torch_distributed(layer):
    for path in layer_files(layer):
        assert not any(name.startswith("torch.distributed") for name in imports(path)), path


def test_only_launch_knows_hydra():
    for path in CODE:
        if path.relative_to(ROOT).parts[0] in ("ringflash", "kernels"):
            assert not any(name.split(".")[0] == "hydra" for name in imports(path)), path


def test_the_library_imports_neither_what_starts_it_nor_its_tests_and_training_is_imported_from_launch_only():
    for path in CODE:
        parts = path.relative_to(ROOT).parts
        if parts[0] not in ("ringflash", "kernels"):
            continue
        above = {"configs", "tests"} | ({"launch"} if path.name != "cli.py" else set())
        if parts[:2] != ("ringflash", "train"):
            above |= {"train"}
        found = {name.split(".")[1] for name in imports(path) if name.startswith("ringflash.")}
        assert not found & above, f"{path.relative_to(ROOT)} imports {sorted(found & above)}"


def test_no_kernel_is_chosen_by_timing():
    for path in layer_files("kernels"):
        assert not re.search(r"autotune|do_bench|heuristics", path.read_text()), path


def test_kernels_folder_is_no_package_that_could_shadow_another_distribution():
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_every_folder_of_the_package_is_one_so_that_no_file_beside_it_can_stand_in_for_it():
    """The checkout is part of the package's path: a user's ring.py in it would be ringflash.ring if that were a bare folder."""
    for folder in {path.parent for path in CODE if path.relative_to(ROOT).parts[0] == "ringflash"}:
        assert (folder / "__init__.py").exists(), folder


def test_every_note_that_code_points_at_is_written_in_design_md():
    written = set(re.findall(r"^#+ Note \[([^\]\n]+)\]", (ROOT / "DESIGN.md").read_text(), flags=re.M))
    pointed = {note for path in CODE if path != Path(__file__) for note in NOTE.findall(path.read_text())}
    assert pointed <= written, f"not in DESIGN.md: {sorted(pointed - written)}"
    assert written <= pointed, f"nothing points at: {sorted(written - pointed)}"


def test_source_is_ascii_and_files_stay_readable_in_one_sitting():
    for path in CODE:
        text = path.read_bytes()
        assert text.isascii(), path
        assert text.count(b"\n") <= 350, f"{path.relative_to(ROOT)}: {text.count(chr(10).encode())} lines"


def test_importing_ringflash_alone_imports_neither_torch_nor_triton():
    code = "import sys, ringflash; assert not {'torch', 'triton', 'hydra'} & set(sys.modules); print(ringflash.__all__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "ring_attention" in done.stdout
