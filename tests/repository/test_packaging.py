"""ringflash imports from a bare checkout, an editable install and a wheel, beside a foreign distribution named `kernels`."""
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROBE = """
import kernels
assert kernels.FOREIGN == 1, kernels.__file__
import ringflash
from ringflash import Layout, Mask, ring_attention
import ringflash.kernels.dispatch, ringflash.launch.check, ringflash.tests.support.oracle
from importlib.resources import files
assert (files("ringflash.configs") / "train.yaml").is_file()
print(ringflash.kernels.dispatch.__file__)
"""


def run_probe(cwd: Path, *path: Path) -> str:
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, path)))
    done = subprocess.run([sys.executable, "-c", PROBE], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def foreign(tmp_path):
    """A site folder that holds somebody else's regular package named kernels."""
    site = tmp_path / "foreign"
    (site / "kernels").mkdir(parents=True)
    (site / "kernels" / "__init__.py").write_text("FOREIGN = 1\n")
    return site


def test_bare_checkout_first_on_the_path_does_not_shadow_a_foreign_kernels(foreign):
    # The checkout comes first, as with `python -m` started inside it: a namespace folder loses against a regular package.
    assert run_probe(ROOT, ROOT, foreign) == str(ROOT / "kernels" / "dispatch.py")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    # A copy without .git and caches, so that building leaves no build/ folder in the checkout.
    source = out / "source"
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout: the file list comes from git")
    for name in listed.stdout.split("\n"):
        if name and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(out), str(source)]
    subprocess.run(command, check=True)
    return next(out.glob("*.whl"))


def test_wheel_holds_kernels_configs_and_the_oracle_and_no_top_level_kernels(wheel, tmp_path, foreign):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    assert "ringflash/kernels/dispatch.py" in names and "ringflash/configs/train.yaml" in names
    assert any(n.startswith("ringflash/configs/experiment/") for n in names)
    assert {n.split("/")[0] for n in names} == {"ringflash", next(n.split("/")[0] for n in names if "dist-info" in n)}
    found = run_probe(tmp_path, tmp_path / "site", foreign)
    assert found == str(tmp_path / "site" / "ringflash" / "kernels" / "dispatch.py")


def test_editable_install_resolves_to_the_checkout(tmp_path, foreign):
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", str(venv)], check=True)
    # The interpreter may itself be a venv, whose packages a nested venv does not see: hand them over by path.
    site = Path(sysconfig.get_paths()["purelib"])
    python = venv / "bin" / "python"
    env = dict(os.environ, PYTHONPATH=str(site))
    install = [str(python), "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--force-reinstall", "-e", str(ROOT)]
    done = subprocess.run(install, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    env["PYTHONPATH"] = os.pathsep.join([str(foreign), str(site)])
    done = subprocess.run([str(python), "-c", PROBE], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(ROOT / "kernels" / "dispatch.py")
