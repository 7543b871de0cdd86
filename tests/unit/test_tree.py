"""The rules of the tree itself: sizes, docstrings, names, ownership, links."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"deployments", "cluster", "engine", "kv_store", "messages", "telemetry"}
OTHER_PYTHON_FOLDERS = {"client", "scripts", "benchmarks", "tests"}
MAX_LINES = 400
VAGUE_WORDS = {"utils", "util", "common", "core", "helpers", "helper", "manager", "managers", "misc", "base"}

ENVIRONMENT_READERS = {
    "deployments/config.py": "the one place where settings come in",
    "deployments/local_ray.py": "sets variables that Ray's processes inherit, and puts the old ones back",
    "engine/demo_model.py": "hands the whole environment on to pip",
}
"""Files that may read the environment, each with its reason."""

# Written so that this file does not contain what it looks for.
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|root)/|/opt/(?:wheels|pypi)")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def list_files() -> list[Path]:
    """Everything that is, or would be, in the repository; generated v1 modules left out."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [Path(name) for name in listed.split("\0") if name]
    return sorted(path for path in paths if (ROOT / path).is_file() and "v1" not in path.parts[:-1])


FILES = list_files()
MODULES = [path for path in FILES if path.suffix == ".py"]
SHIPPED = [path for path in MODULES if path.parts[0] in PACKAGES or path.parts[:2] == ("client", "src")]
PAGES = [path for path in FILES if path.suffix == ".md"]


def read(path: Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def reads_environment(path: Path) -> bool:
    """Whether a module uses os.environ or os.getenv for more than setting a variable for its children."""
    nodes = list(ast.walk(ast.parse(read(path))))
    written = {
        id(node.value)
        for node in nodes
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del)
    }
    used = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute) and id(node) not in written}
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module == "os"]
    imported = {alias.name for node in imports for alias in node.names}
    return bool(used & {"os.environ", "os.getenv"} or imported & {"environ", "getenv"})


def test_no_module_is_longer_than_the_limit() -> None:
    sizes = {str(path): len(read(path).splitlines()) for path in MODULES}

    assert {name: size for name, size in sizes.items() if size > MAX_LINES} == {}


def test_every_module_says_its_one_idea_first() -> None:
    silent = [
        str(path) for path in MODULES if path.parts[0] != "tests" and not ast.get_docstring(ast.parse(read(path)))
    ]

    assert silent == []


def test_no_file_or_folder_has_a_vague_name() -> None:
    vague = {
        str(path)
        for path in MODULES
        for part in (*path.parts[:-1], path.stem)
        if VAGUE_WORDS & set(part.lower().split("_"))
    }

    assert vague == set()


@pytest.mark.parametrize("folder", ["proto", "tests", "client/tests"])
def test_folders_that_are_no_packages_have_no_init(folder: str) -> None:
    assert [str(path) for path in MODULES if path.is_relative_to(folder) and path.name == "__init__.py"] == []


def test_the_top_level_packages_are_the_known_ones() -> None:
    packages = {path.parts[0] for path in MODULES if len(path.parts) == 2 and path.name == "__init__.py"}
    python_folders = {path.parts[0] for path in MODULES if len(path.parts) > 1}

    assert packages == PACKAGES
    assert python_folders - packages <= OTHER_PYTHON_FOLDERS
    assert [str(path) for path in MODULES if len(path.parts) == 1] == []


def test_only_the_configuration_reads_the_environment() -> None:
    readers = {path.as_posix() for path in SHIPPED if reads_environment(path)}

    assert readers - set(ENVIRONMENT_READERS) == set()


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_relative_link_of_a_page_leads_somewhere(page: Path) -> None:
    links = [link.split("#")[0] for link in LINK.findall(read(page)) if "://" not in link]
    broken = [link for link in links if link and not (ROOT / page.parent / link).exists()]

    assert broken == []


def test_the_architecture_page_links_a_file_in_every_step() -> None:
    steps = re.findall(r"^\d+\. .*(?:\n(?: .*|))*", read(Path("docs/architecture.md")), re.MULTILINE)

    assert len(steps) >= 7
    assert [step.splitlines()[0] for step in steps if not LINK.search(step)] == []


def test_no_file_names_a_path_of_the_machine_it_was_written_on() -> None:
    texts = {path: (ROOT / path).read_bytes().decode("utf-8", errors="ignore") for path in FILES}

    assert [str(path) for path, text in texts.items() if MACHINE_PATH.search(text)] == []
