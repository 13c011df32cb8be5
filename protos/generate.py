"""Regenerates the stubs beside the .proto files: ``python -m protos.generate``.

The stubs are committed and never edited. The include prefix ``protos/`` makes protoc write imports that work from any
directory (``from protos import sampling_pb2``). The compiler's version is pinned in pyproject.toml: stubs demand a
runtime at least as new as their generator.
"""

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).parent


def generate(output: Path) -> list[Path]:
    """Writes all stubs below ``output``/protos and returns their paths. Raises RuntimeError when protoc refuses."""
    from grpc_tools import protoc

    sources = sorted(HERE.glob("*.proto"))
    (output / "protos").mkdir(parents=True, exist_ok=True)
    well_known = Path(protoc.__file__).parent / "_proto"
    code = protoc.main(
        [
            "protoc",
            f"--proto_path=protos={HERE}",
            f"--proto_path={well_known}",
            f"--python_out={output}",
            f"--pyi_out={output}",
            f"--grpc_python_out={output}",
            *(f"protos/{source.name}" for source in sources),
        ]
    )
    if code:
        raise RuntimeError(f"protoc ended with status {code}; its messages are above")
    for source in sources:
        if "\nservice " not in source.read_text():  # protoc writes an empty stub for a file without a service
            (output / "protos" / f"{source.stem}_pb2_grpc.py").unlink()
    return sorted(path for path in (output / "protos").iterdir() if "_pb2" in path.name)


def main() -> None:
    argparse.ArgumentParser(prog="python -m protos.generate", description="Regenerate the gRPC stubs.").parse_args()
    for path in generate(HERE.parent):
        sys.stdout.write(f"{path.relative_to(HERE.parent)}\n")


if __name__ == "__main__":
    main()
