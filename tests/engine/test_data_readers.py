import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from fullstride.engine.data.corpus import build_corpus, check_vocabulary, open_corpus
from fullstride.engine.data.readers import find_files, read_examples
from fullstride.engine.data.tokenise import load_tokenizer, parts_of
from fullstride.errors import BadInput

CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"


def write_tokenizer(folder, **config):
    words = ["</s>", "[UNK]", "hello", "world", "[", "]", "user", "assistant"]
    fast = tokenizers.Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    fast.pre_tokenizer = Whitespace()
    folder.mkdir(exist_ok=True)
    fast.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def corpus_of(source, cache, tokenizer="bytes"):
    return open_corpus(build_corpus(str(source), str(tokenizer), cache))


def test_a_folder_is_read_recursively_and_sorted(tmp_path):
    for name in ("b.txt", "a/z.txt", ".hidden/x.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [p.name for p in find_files(str(tmp_path))] == ["z.txt", "b.txt"]


def test_the_standard_library_is_text_and_leaves_foreign_packages_out():
    files = find_files("stdlib")
    assert len(files) > 200
    assert not [p for p in files if "site-packages" in p.parts]
    assert any(p.name == "ast.py" for p in files)


def test_text_becomes_bytes_with_an_end_after_each_document(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "1.txt").write_text("aé")
    (data / "2.txt").write_text("b")
    corpus = corpus_of(data, tmp_path / "cache")
    assert corpus.tokens.tolist() == [*"aé".encode(), 257, 98, 257]
    assert corpus.starts.tolist() == [0, 4]
    assert corpus.counted is None
    assert not corpus.info.whole


def test_prompts_do_not_count(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "ab", "completion": "c"}\n\n{"prompt": "d", "completion": "ef"}\n')
    corpus = corpus_of(path, tmp_path / "cache")
    assert corpus.tokens.tolist() == [97, 98, 99, 257, 100, 101, 102, 257]
    assert corpus.counted.tolist() == [0, 0, 1, 1, 0, 1, 1, 1]
    assert corpus.info.whole


def test_only_the_assistant_counts_in_conversations(tmp_path):
    path = tmp_path / "d.jsonl"
    turns = [("system", "s"), ("user", "u"), ("assistant", "yes"), ("user", "v"), ("assistant", "no")]
    path.write_text(json.dumps({"messages": [{"role": r, "content": c} for r, c in turns]}) + "\n")
    parts = parts_of(next(read_examples(path)), load_tokenizer("bytes"))
    assert [part.text for part in parts if part.counted] == ["yes\n", "no\n"]
    whole = "".join(part.text for part in parts)
    assert whole == "<|system|>\ns\n<|user|>\nu\n<|assistant|>\nyes\n<|user|>\nv\n<|assistant|>\nno\n"


def test_conversations_use_the_tokenizers_own_template(tmp_path):
    folder = write_tokenizer(tmp_path / "tok", eos_token="</s>", chat_template=CHAT)
    path = tmp_path / "d.jsonl"
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]
    path.write_text(json.dumps({"messages": turns}))
    corpus = corpus_of(path, tmp_path / "cache", folder)
    assert corpus.tokens.tolist() == [4, 6, 5, 2, 4, 7, 5, 3, 0]
    assert corpus.counted.tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("rows", [{"text": ["hello world", "hello"]}, {"prompt": ["a"], "completion": ["b"]}])
def test_parquet_has_the_same_columns(tmp_path, rows):
    path = tmp_path / "d.parquet"
    pyarrow.parquet.write_table(pyarrow.table(rows), path)
    examples = list(read_examples(path))
    assert "".join(p.text for e in examples for p in e.parts) == "".join("".join(c) for c in zip(*rows.values(), strict=True))


def test_a_corpus_is_built_once_and_again_when_a_file_changes(tmp_path):
    path = tmp_path / "d.txt"
    path.write_text("one")
    first = build_corpus(str(path), "bytes", tmp_path / "cache")
    made = (first / "tokens.bin").stat().st_mtime_ns
    assert build_corpus(str(path), "bytes", tmp_path / "cache") == first
    assert (first / "tokens.bin").stat().st_mtime_ns == made
    path.write_text("other")
    assert build_corpus(str(path), "bytes", tmp_path / "cache") != first


def test_tokens_beyond_the_models_vocabulary_are_one_clear_error(tmp_path):
    (tmp_path / "d.txt").write_text("abc")
    corpus = corpus_of(tmp_path / "d.txt", tmp_path / "cache")
    check_vocabulary(corpus, 258)
    with pytest.raises(BadInput, match="holds token 257, the model's vocabulary has 100"):
        check_vocabulary(corpus, 100)


def test_a_file_tokenizer_without_a_known_end_is_refused(tmp_path):
    folder = write_tokenizer(tmp_path / "tok", eos_token="<nope>")
    with pytest.raises(BadInput, match="end token"):
        load_tokenizer(str(folder))


BAD = {
    "binary.txt": (b"\0\1\2", "is not text"),
    "latin.txt": ("é".encode("latin-1"), "is not UTF-8 text .byte 0 is 0xe9"),
    "broken.jsonl": (b'{"text": "a"}\n{"text"', "line 2 is not JSON"),
    "keys.jsonl": (b'{"content": "a"}', r"keys \['content'\], none of"),
    "list.jsonl": (b"[1]", "holds a list"),
    "number.jsonl": (b'{"text": 3}', "`text` is a int"),
    "turns.jsonl": (b'{"messages": [{"role": "user"}]}', "not a list of objects"),
    "x.parquet": (b"PAR1 no", "not a Parquet file"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_one_line_that_names_them(tmp_path, name):
    raw, message = BAD[name]
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(BadInput, match=message) as caught:
        corpus_of(tmp_path / name, tmp_path / "cache")
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").iterdir())


def test_missing_and_empty_data_are_bad_input(tmp_path):
    with pytest.raises(BadInput, match="no such file or folder"):
        find_files(str(tmp_path / "nowhere"))
    with pytest.raises(BadInput, match="holds no file with content"):
        find_files(str(tmp_path))
    with pytest.raises(BadInput, match=r"no tokenizer.json there"):
        load_tokenizer(str(tmp_path))


def test_a_cache_that_was_cut_short_is_refused(tmp_path):
    (tmp_path / "d.txt").write_text("abc")
    folder = build_corpus(str(tmp_path / "d.txt"), "bytes", tmp_path / "cache")
    np.fromfile(folder / "tokens.bin", dtype=np.uint8)[:-1].tofile(folder / "tokens.bin")
    with pytest.raises(BadInput, match=r"tokens.bin: is damaged"):
        open_corpus(folder)
