"""Model folders that servers can serve without a checkpoint's weights."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models


def servable(model: Path, folder: Path) -> tuple[Path, str | None]:
    """The model as servers take it, and the --load-format that it needs, if any.

    A folder without weights gets random ones. One without a tokenizer is copied into ``folder`` with a made-up one:
    token 5 is " 5", so that a text tells its ids.
    """
    if model.is_file():
        return model, None
    load_format = None if list(model.glob("*.safetensors")) else "dummy"
    if not (model / "tokenizer.json").exists():
        copy = folder / model.name
        copy.mkdir()
        for path in (*model.glob("*.json"), *model.glob("*.safetensors")):
            (copy / path.name).symlink_to(path.resolve())
        _save_tokenizer(copy, json.loads((model / "config.json").read_text())["vocab_size"])
        model = copy
    return model, load_format


def _save_tokenizer(folder: Path, vocab_size: int) -> None:
    vocabulary = {f"Ġ{token_id}": token_id for token_id in range(vocab_size - 1)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken("<end>", normalized=False, special=True)])
    core.save(str(folder / "tokenizer.json"))
