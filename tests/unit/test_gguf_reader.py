"""The quick reader of GGUF files says what the package's own reader says."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from protos.gguf_reader import FastGGUFReader


def contents(reader: gguf.GGUFReader) -> dict[str, object]:
    return {name: (field.contents(), field.types) for name, field in reader.fields.items()}


@pytest.fixture
def small_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("texts", ["", "a", "déjà", "\u4e2d\u6587"])
    writer.add_array("integers", [3, -4, 5])
    writer.add_array("floats", [0.5, -2.0])
    writer.add_array("flags", [True, False])
    writer.add_string("one", "text")
    writer.add_tensor("weights", np.arange(64, dtype=np.float32).reshape(2, 32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_all_kinds_of_fields_and_tensors_are_the_packages(small_file):
    plain, fast = gguf.GGUFReader(small_file), FastGGUFReader(small_file)
    assert contents(fast) == contents(plain)
    assert contents(fast)["texts"][0] == ["", "a", "déjà", "\u4e2d\u6587"]
    for name in ("texts", "integers"):
        field, expected = fast.fields[name], plain.fields[name]
        assert [field.contents(index) for index in range(3)] == [expected.contents(index) for index in range(3)]
    assert np.array_equal(fast.tensors[0].data, plain.tensors[0].data)


def test_a_real_models_file_is_read_alike(demo_model):
    plain, fast = gguf.GGUFReader(demo_model), FastGGUFReader(demo_model)
    assert contents(fast) == contents(plain)
    assert [tensor.name for tensor in fast.tensors] == [tensor.name for tensor in plain.tensors]
    assert all(np.array_equal(a.data, b.data) for a, b in zip(fast.tensors, plain.tensors, strict=True))


def test_a_file_of_the_other_byte_order_is_read_alike(tmp_path):
    path = tmp_path / "big.gguf"
    writer = gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_array("texts", ["a", "bc"])
    writer.add_array("integers", [1, 2, 70_000])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert contents(FastGGUFReader(path)) == contents(gguf.GGUFReader(path))
    assert contents(FastGGUFReader(path))["integers"][0] == [1, 2, 70_000]


def test_wherever_a_file_is_cut_off_it_is_refused_with_an_error_that_callers_expect(small_file, tmp_path):
    whole = small_file.read_bytes()
    cut = tmp_path / "cut.gguf"
    end_of_fields = whole.index(b"weights")
    for size in range(4, end_of_fields):
        cut.write_bytes(whole[:size])
        with pytest.raises((ValueError, LookupError)):
            FastGGUFReader(cut)


def test_a_count_beyond_the_file_is_refused_without_reading_on(small_file, tmp_path):
    whole = small_file.read_bytes()
    for name, number in (("integers", 3), ("texts", 4)):
        at = whole.index(name.encode()) + len(name) + 4 + 4
        assert int.from_bytes(whole[at : at + 8], "little") == number
        wrong = tmp_path / f"{name}.gguf"
        wrong.write_bytes(whole[:at] + (1 << 62).to_bytes(8, "little") + whole[at + 8 :])
        with pytest.raises(ValueError, match="does not fit into the file"):
            FastGGUFReader(wrong)
