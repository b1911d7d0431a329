"""Text to token ids: bytes, or a Hugging Face tokenizer from disk (never from the network)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from fullstride.engine.data.readers import Example, Part
from fullstride.errors import BadInput
from fullstride.files import write_bytes

BYTES = "bytes"
BYTE_BOS, BYTE_EOS, BYTE_VOCABULARY = 256, 257, 258
_BYTE_SPECIAL = ("<|begin|>", "<|end|>")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
_END_NAMES = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[EOS]")

Ids: TypeAlias = npt.NDArray[np.int64]


class Tokenizer(Protocol):
    """What packing needs to know of a tokenizer."""

    vocabulary: int
    """Ids are below it."""
    eos: int
    """Stands after each document."""
    prefix: tuple[int, ...]
    """Stands before each document: what the tokenizer itself puts there, such as a begin token."""
    identity: str
    """Digest of everything that decides the ids."""

    def encode(self, text: str) -> Ids:
        """Ids of a text, without special tokens."""
        ...

    def render(self, messages: tuple[dict[str, str], ...], *, answer_next: bool) -> str:
        """A conversation as text; `answer_next` opens the assistant's turn."""
        ...


def load_tokenizer(source: str) -> Tokenizer:
    """The tokenizer named in a Workload.

    Args:
        source: `bytes`, a `tokenizer.json`, or a directory that holds one.

    Raises:
        BadInput: not there, not a tokenizer, or its end token cannot be told.
    """
    return ByteTokenizer() if source == BYTES else FileTokenizer(source)


def _plain_chat(messages: tuple[dict[str, str], ...], answer_next: bool) -> str:
    turns = "".join(f"<|{m['role']}|>\n{m['content']}\n" for m in messages)
    return turns + ("<|assistant|>\n" if answer_next else "")


class ByteTokenizer:
    """UTF-8 bytes are ids 0 to 255; 256 is reserved for begin, 257 is end. Conversations use `<|role|>` lines."""

    vocabulary = BYTE_VOCABULARY
    eos = BYTE_EOS
    prefix: tuple[int, ...] = ()
    identity = "bytes-1"

    def encode(self, text: str) -> Ids:
        """One id a byte."""
        return np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8).astype(np.int64)

    def render(self, messages: tuple[dict[str, str], ...], *, answer_next: bool) -> str:
        """Each turn is `<|role|>`, a line break, the content, a line break."""
        return _plain_chat(messages, answer_next)


def write_byte_tokenizer(folder: Path) -> None:
    """Write `bytes` as `tokenizer.json` and `tokenizer_config.json`, so that transformers gives text the same ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = _byte_letters()
    made = Tokenizer(models.BPE({letter: byte for byte, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in _BYTE_SPECIAL])
    made.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _BYTE_SPECIAL[0],
        "eos_token": _BYTE_SPECIAL[1],
        "clean_up_tokenization_spaces": False,
    }
    write_bytes(folder / "tokenizer_config.json", json.dumps(settings, indent=2).encode() + b"\n")


def _byte_letters() -> list[str]:
    """The printable letter that stands for each byte in byte-level vocabularies, as GPT-2's code assigns them."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]


class FileTokenizer:
    """A `tokenizer.json`, with its neighbours `tokenizer_config.json` and `chat_template.jinja` where they exist."""

    def __init__(self, source: str) -> None:
        """Read the files at `source`; see `load_tokenizer` for the errors."""
        import tokenizers

        path = Path(source)
        self.path = path / "tokenizer.json" if path.is_dir() else path
        if not self.path.is_file():
            raise BadInput(f"tokenizer {source!r}: no tokenizer.json there", fix="give `bytes`, a tokenizer.json or its folder")
        try:
            self._fast = tokenizers.Tokenizer.from_file(str(self.path))
        except Exception as error:  # the library raises a bare Exception
            message = f"tokenizer {str(self.path)!r} cannot be read ({str(error).splitlines()[0]})"
            raise BadInput(message, fix="give a tokenizer.json as written by Hugging Face tokenizers") from None
        # A file may ask for cut-off or padding at a fixed length; a corpus is cut by packing alone.
        self._fast.no_truncation()
        self._fast.no_padding()
        self._config = _json_beside(self.path, "tokenizer_config.json")
        self.vocabulary = self._fast.get_vocab_size(with_added_tokens=True)
        self.eos = self._find_eos()
        own = list(self._fast.encode("", add_special_tokens=True).ids)
        self.prefix = tuple(own[:-1] if own and own[-1] == self.eos else own)
        self._template = self._find_template()
        self.identity = self._digest()

    def _find_eos(self) -> int:
        named = self._config.get("eos_token")
        named = named.get("content") if isinstance(named, dict) else named
        ids = {name: self._fast.token_to_id(name) for name in ((named,) if named else _END_NAMES)}
        known = {name: int(number) for name, number in ids.items() if number is not None}
        if len(known) != 1:
            found = f"holds {', '.join(known)}" if known else "holds no end token that is known"
            raise BadInput(
                f"tokenizer {str(self.path)!r} {found}, and its end token must be one",
                fix='write {"eos_token": "..."} to tokenizer_config.json beside it',
            )
        return next(iter(known.values()))

    def _find_template(self) -> str:
        beside = self.path.parent / "chat_template.jinja"
        if beside.is_file():
            return beside.read_text()
        template = self._config.get("chat_template")
        return template if isinstance(template, str) else ""

    def _digest(self) -> str:
        content = hashlib.sha256(self.path.read_bytes())
        content.update(f"{self.eos} {self.prefix} {self._template}".encode())
        return content.hexdigest()[:16]

    def encode(self, text: str) -> Ids:
        """Ids by the tokenizer's own rules, without special tokens."""
        return np.asarray(self._fast.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def render(self, messages: tuple[dict[str, str], ...], *, answer_next: bool) -> str:
        """By the tokenizer's chat template.

        Raises:
            BadInput: the tokenizer has none, or it refuses these messages.
        """
        if not self._template:
            raise BadInput(
                f"tokenizer {str(self.path)!r} has no chat template and the data has `messages`",
                fix="put a chat_template.jinja beside it, or write the data as `prompt` and `completion`",
            )
        try:
            return str(self._chat().apply_chat_template(list(messages), tokenize=False, add_generation_prompt=answer_next))
        except Exception as error:  # whatever a template raises
            raise BadInput(f"the chat template refuses a conversation ({error})", fix="correct data or template") from None

    def _chat(self) -> Any:
        if not hasattr(self, "_renderer"):
            from transformers import PreTrainedTokenizerFast

            names = {key: self._token_text(key) for key in ("bos_token", "eos_token") if self._token_text(key)}
            make: Any = PreTrainedTokenizerFast  # untyped
            self._renderer = make(tokenizer_object=self._fast, chat_template=self._template, **names)
        return self._renderer

    def _token_text(self, key: str) -> str:
        named = self._config.get(key) or (self._fast.id_to_token(self.eos) if key == "eos_token" else "")
        return str(named.get("content", "")) if isinstance(named, dict) else str(named)


def _json_beside(path: Path, name: str) -> dict[str, Any]:
    beside = path.parent / name
    if not beside.is_file():
        return {}
    try:
        content = msgspec.json.decode(beside.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{beside}: is not JSON ({error})", fix="check that the file is complete") from None
    return content if isinstance(content, dict) else {}


def parts_of(example: Example, tokenizer: Tokenizer) -> tuple[Part, ...]:
    """Texts of an example; a conversation is rendered turn by turn so that only the assistant's turns count.

    Raises:
        BadInput: the template changes earlier turns when a later one is added.
    """
    if not example.messages:
        return example.parts
    parts, done = [], ""
    for number, message in enumerate(example.messages):
        assistant = message["role"] == "assistant"
        if assistant:
            opened = tokenizer.render(example.messages[:number], answer_next=True)
            parts.append(Part(_grown(done, opened), counted=False))
            done = opened
        following = example.messages[number + 1 : number + 2]
        if assistant or not following or following[0]["role"] != "assistant":
            closed = tokenizer.render(example.messages[: number + 1], answer_next=False)
            parts.append(Part(_grown(done, closed), counted=assistant))
            done = closed
    return tuple(part for part in parts if part.text)


def _grown(before: str, after: str) -> str:
    if not after.startswith(before):
        raise BadInput(
            "the chat template changes earlier turns when a turn is added, so the assistant's words cannot be told apart",
            fix="write the data as `prompt` and `completion`",
        )
    return after[len(before) :]


def encode_example(example: Example, tokenizer: Tokenizer) -> tuple[Ids, npt.NDArray[np.bool_]]:
    """Ids of one example, prefix and end token included, and whether each counts: two arrays of one length.

    The end token counts where the last part does, so that a fine-tuned model learns to stop.
    """
    parts = parts_of(example, tokenizer)
    counted_last = parts[-1].counted if parts else True
    pieces = [(np.asarray(tokenizer.prefix, dtype=np.int64), bool(parts) and parts[0].counted)]
    pieces += [(tokenizer.encode(part.text), part.counted) for part in parts]
    pieces.append((np.asarray([tokenizer.eos], dtype=np.int64), counted_last))
    ids = np.concatenate([piece for piece, _ in pieces])
    return ids, np.concatenate([np.full(len(piece), counted) for piece, counted in pieces])
