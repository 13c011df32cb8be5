"""What the benchmarks of serving rest on: models that they make servable, and figures that they draw from records."""

import json
from pathlib import Path

import pytest

from benchmarks.serving.records import describe, quantile
from benchmarks.serving.servable import servable
from quire.bench.records import Record
from router.tokenizer_loading import load_tokenizer
from worker.vocabulary import folder_vocabulary


def test_a_made_up_tokenizer_has_a_text_for_every_id(tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text(json.dumps({"vocab_size": 400}))
    (tmp_path / "made").mkdir()
    model, load_format = servable(tmp_path / "bare", tmp_path / "made")
    assert load_format == "dummy"
    assert json.loads((model / "config.json").read_text()) == {"vocab_size": 400}
    tokenizer = load_tokenizer(model)
    assert tokenizer.vocab_size == 400
    assert tokenizer.decode([5, 17, 398]) == " 5 17 398"
    assert folder_vocabulary(model).tokens[17] == b" 17"
    assert not (tmp_path / "bare" / "tokenizer.json").exists()


def test_figures_of_records() -> None:
    records = [
        Record(10.0, times=[10.5, 10.6, 10.8], tokens=3, started=0),
        Record(11.0, times=[11.1, 11.2, 12.0], tokens=5, started=1),
    ]
    said = describe(records, first_wave=1)
    assert said == (
        "4 output tokens/s, 1.00 requests/s, TTFT 500.00 / 500.00, after the first wave 100.00 / 100.00, "
        "ITL 200.00 / 800.00"
    )
    assert quantile([3.0, 1.0, 2.0], 0.0) == pytest.approx(1.0)
