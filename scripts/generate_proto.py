"""Generate the protobuf modules; with --check only say whether they are up to date."""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGETS = {
    "kvferry/v1/inference.proto": ROOT / "client" / "src",
    "messages/v1/worker.proto": ROOT,
}
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def generate(proto: str, out: Path) -> None:
    """Run protoc for one file; the stubs for type checkers come from mypy-protobuf."""
    plugin_path = str(Path(sys.executable).parent)
    command = [
        sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}",
        f"--plugin=protoc-gen-mypy={plugin_path}/protoc-gen-mypy",
        f"--plugin=protoc-gen-mypy_grpc={plugin_path}/protoc-gen-mypy_grpc",
        f"--python_out={out}", f"--grpc_python_out={out}", f"--mypy_out={out}", f"--mypy_grpc_out={out}", proto,
    ]  # fmt: skip
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


def main() -> int:
    """Write or compare; exit code 1 says that something is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 when a file is out of date")
    check = parser.parse_args().check
    stale = []
    with tempfile.TemporaryDirectory() as scratch:
        for proto, target in TARGETS.items():
            generate(proto, Path(scratch))
            stem = proto.removesuffix(".proto")
            for suffix in SUFFIXES:
                new, old = Path(scratch, stem + suffix), target / (stem + suffix)
                if old.exists() and old.read_bytes() == new.read_bytes():
                    continue
                stale.append(str(old.relative_to(ROOT)))
                if not check:
                    shutil.copyfile(new, old)
    for name in stale:
        print(("out of date: " if check else "wrote ") + name)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
