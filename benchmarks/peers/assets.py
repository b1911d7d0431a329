"""A small tokenizer and corpus for peers, made from the Python standard library's sources: `assets.py FOLDER`."""

import json
import sys
import sysconfig
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SIZE = 12_000_000


def texts():
    """Source files up to SIZE characters in all."""
    total = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" in str(path) or total > SIZE:
            continue
        text = path.read_text(errors="ignore")
        if len(text) > 200:
            total += len(text)
            yield text


def main(folder):
    """Write data/train.jsonl and tok/tokenizer.json."""
    corpus = list(texts())
    (folder / "data").mkdir(parents=True, exist_ok=True)
    (folder / "tok").mkdir(exist_ok=True)
    with open(folder / "data" / "train.jsonl", "w") as out:
        out.writelines(json.dumps({"text": text}) + "\n" for text in corpus)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|bos|>", "<|eos|>"]
    trainer = trainers.BpeTrainer(vocab_size=4096, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(corpus[:200], trainer)
    tokenizer.save(str(folder / "tok" / "tokenizer.json"))
    config = {"bos_token": special[0], "eos_token": special[1], "add_bos_token": True, "add_eos_token": True}
    (folder / "tok" / "tokenizer_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
