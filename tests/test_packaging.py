"""The package as it is installed: what the wheel holds, what `import gradcomp` costs, which names are public."""

import email
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import gradcomp

ROOT = Path(__file__).resolve().parent.parent
LINKS = {"gradcomp/kernels": "../kernels", "gradcomp/integrations": "../integrations"}

# The public interface. Adding a name is a decision, removing one breaks users: both are made here too.
ROOT_NAMES = {
    *("register", "ddp_hook", "Handle", "Stats", "Rule"),
    *("Compressor", "register_compressor", "compressor_names", "parse_spec", "format_spec"),
    *("GradcompError", "ConfigError", "ExchangeError", "MismatchError", "UnsupportedError"),
}
MAX_ROOT_NAMES = 15

# What `import gradcomp` must not load: optional, or slow, or both.
HEAVY = ("cupy", "deepspeed", "matplotlib", "numba", "pydantic", "rich", "sklearn", "tensorboard", "typer")
IMPORT_LIMIT_MS = 60


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=100)


def git(*arguments: str) -> str:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    # The checkout may belong to another user, as it does in some containers; git then wants to be told that it is safe.
    result = run("git", "-c", f"safe.directory={ROOT}", *arguments, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return result.stdout


def tree_files() -> Iterator[str]:
    """The files of the working tree, links as themselves: tracked, or new and not ignored."""
    for name in git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0"):
        if name and os.path.lexists(ROOT / name):
            yield name


def copy_tree(target: Path) -> Path:
    """Copy the working tree. Never build in the tree itself: a left-over build/lib ends up in the next wheel."""
    for name in tree_files():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    return target


def build_wheel(tree: Path) -> Path:
    out = tree.parent / "wheel"
    result = run(
        *(sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-index"),
        *("--no-build-isolation", "--no-deps", "--wheel-dir", str(out), str(tree)),
        cwd=tree.parent,
    )
    assert result.returncode == 0, result.stderr
    (wheel,) = out.glob("gradcomp-*.whl")
    return wheel


def missing(tree: Path, wheel: Path) -> set[str]:
    """Return what the tree's packages hold and the wheel lacks: every file but the documentation."""
    expected = set()
    for folder, prefix in (("gradcomp", ""), ("kernels", "gradcomp/"), ("integrations", "gradcomp/")):
        for parent, _, names in os.walk(tree / folder):  # does not follow links
            for path in (Path(parent, name) for name in names):
                if path.suffix not in (".md", ".pyc") and not path.is_symlink():
                    expected.add(prefix + path.relative_to(tree).as_posix())
    expected -= LINKS.keys()  # plain files where the links got lost; what they stood for is still expected
    return expected - set(zipfile.ZipFile(wheel).namelist())


@pytest.fixture(scope="module")
def planted_wheel(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A copy of the tree with a CUDA source of each suffix added, and its wheel."""
    tree = copy_tree(tmp_path_factory.mktemp("planted") / "tree")
    for name in ("planted.cu", "planted.cuh", "planted.h"):
        (tree / "kernels" / name).write_text("// planted by a test\n")
    return tree, build_wheel(tree)


def test_wheel_holds_every_file_of_the_tree(planted_wheel: tuple[Path, Path]) -> None:
    tree, wheel = planted_wheel
    assert missing(tree, wheel) == set()
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"gradcomp/py.typed", "gradcomp/kernels/planted.cu", "gradcomp/integrations/__init__.py"} <= names
    top_level = {name.split("/")[0] for name in names}
    assert {name for name in top_level if not name.endswith(".dist-info")} == {"gradcomp"}


def test_wheel_states_the_version_and_needs_torch_and_numpy_only(planted_wheel: tuple[Path, Path]) -> None:
    archive = zipfile.ZipFile(planted_wheel[1])
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(archive.read(name))
    assert metadata["Version"] == gradcomp.__version__
    assert f"\nversion: {gradcomp.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    core = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(core) == ["numpy", "torch>=2.6"]


def links_as_text(tree: Path) -> None:
    """What git leaves with core.symlinks=false, and some unzip programs."""
    for link, target in LINKS.items():
        (tree / link).unlink()
        (tree / link).write_text(target)


def links_removed(tree: Path) -> None:
    for link in LINKS:
        (tree / link).unlink()


def subpackage_without_init(tree: Path) -> None:
    (tree / "kernels" / "planted").mkdir()
    (tree / "kernels" / "planted" / "planted.py").write_text('"""Planted."""\n')


def forgotten_suffix(tree: Path) -> None:
    (tree / "kernels" / "planted.ptx").write_text("// planted by a test\n")


@pytest.mark.parametrize(
    ("damage", "lost"),
    [
        (links_as_text, "gradcomp/kernels/__init__.py"),
        (links_removed, "gradcomp/integrations/__init__.py"),
        (subpackage_without_init, "gradcomp/kernels/planted/planted.py"),
        (forgotten_suffix, "gradcomp/kernels/planted.ptx"),
    ],
)
def test_wheel_comparison_notices_what_is_lost(damage: Callable[[Path], None], lost: str, tmp_path: Path) -> None:
    tree = copy_tree(tmp_path / "tree")
    damage(tree)
    assert lost in missing(tree, build_wheel(tree))


@pytest.mark.parametrize(("link", "target"), LINKS.items())
def test_links_are_links_in_git(link: str, target: str) -> None:
    assert git("ls-files", "--stage", "--", link).startswith("120000 ")
    assert os.readlink(ROOT / link) == target


@pytest.mark.parametrize("name", ["kernels", "integrations"])
def test_linked_folder_refuses_to_be_a_top_level_package(name: str) -> None:
    result = run(sys.executable, "-c", f"import sys; sys.path.insert(0, ''); import {name}", cwd=ROOT)
    assert result.returncode == 1
    assert f"ImportError: this folder is the package gradcomp.{name}" in result.stderr
    assert f"import gradcomp.{name}" in result.stderr


def test_root_names_are_frozen() -> None:
    assert len(gradcomp.__all__) == len(set(gradcomp.__all__)) <= MAX_ROOT_NAMES
    assert set(gradcomp.__all__) == ROOT_NAMES
    assert [name for name in gradcomp.__all__ if not hasattr(gradcomp, name)] == []


IMPORT_PROBE = f"""
import sys, time
import numpy, torch
before = set(sys.modules)
start = time.perf_counter()
import gradcomp
print((time.perf_counter() - start) * 1000)
print(*sorted({{name.partition(".")[0] for name in set(sys.modules) - before}} & set({HEAVY})))
"""


def test_import_is_quick_and_loads_nothing_heavy(tmp_path: Path) -> None:
    times = []
    for _ in range(5):  # the best of several: the first compiles the sources, and the machine may be busy
        result = run(sys.executable, "-c", IMPORT_PROBE, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        milliseconds, heavy = result.stdout.split("\n")[:2]
        assert heavy == "", f"import gradcomp loads {heavy}"
        times.append(float(milliseconds))
        if times[-1] < IMPORT_LIMIT_MS:
            break
    assert min(times) < IMPORT_LIMIT_MS, times
