"""The committed stubs are those of the committed .proto files."""

from pathlib import Path

from protos.generate import generate

PROTOS = Path(__file__).resolve().parents[2] / "protos"


def test_committed_stubs_are_what_the_compiler_makes(tmp_path: Path) -> None:
    made = {path.name: path.read_bytes() for path in generate(tmp_path)}
    committed = {path.name: path.read_bytes() for path in PROTOS.iterdir() if "_pb2" in path.name}
    assert made.keys() == committed.keys()
    stale = [name for name in made if made[name] != committed[name]]
    assert not stale, f"make protos, and commit {stale}"
