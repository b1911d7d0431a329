import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fullstride.engine.data.corpus import build_corpus, open_corpus
from fullstride.engine.data.loader import Loader, Share, share_of
from fullstride.engine.data.pack import NOT_COUNTED, pack, permuted
from fullstride.errors import BadInput
from fullstride.plan.plan import Data, Layout


def packing_of(tmp_path, texts, length, documents="across", seed=0, suffix="txt"):
    data = tmp_path / "data"
    data.mkdir(exist_ok=True)
    for number, text in enumerate(texts):
        (data / f"{number:03d}.{suffix}").write_text(text)
    return pack(open_corpus(build_corpus(str(data), "bytes", tmp_path / "cache")), length, documents, seed)


def loader_of(packing, per_step, index=0, count=1, first=0, **data):
    return Loader(packing, per_step, Share(index, count), Data(**data), first_sample=first)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.integers(0, 2**64 - 1))
def test_the_permutation_is_one_to_one(size, key):
    assert sorted(permuted(i, size, key) for i in range(size)) == list(range(size))


def test_seeds_and_epochs_give_other_orders():
    orders = {tuple(permuted(i, 50, key) for i in range(50)) for key in range(20)}
    assert len(orders) == 20


def test_a_stream_is_cut_without_losing_or_doubling_a_token(tmp_path):
    packing = packing_of(tmp_path, ["abcdefg", "hij", "kl"], 4)
    assert packing.num_samples == 3  # 15 tokens
    got = [packing.at(i)["input_ids"].tolist() for i in range(3)]
    assert [token for row in got for token in row] == [*b"abcdefg", 257, *b"hij", 257]
    assert (packing.at(0)["labels"] == packing.at(0)["input_ids"]).all()
    assert "document_ids" not in packing.at(0)


def test_separate_documents_are_numbered_and_borders_are_not_predicted(tmp_path):
    packing = packing_of(tmp_path, ["ab", "cd", "efghijkl"], 5, "separate")
    row = packing.at(0)
    assert row["input_ids"].tolist() == [97, 98, 257, 99, 100]
    assert row["document_ids"].tolist() == [0, 0, 0, 1, 1]
    assert row["labels"].tolist() == [97, 98, 257, NOT_COUNTED, 100]


def test_fine_tuning_examples_are_never_cut_unless_longer_than_a_sample(tmp_path):
    rows = ['{"prompt": "ab", "completion": "c"}', '{"prompt": "d", "completion": "e"}']
    rows += ['{"prompt": "f", "completion": "ghijklmnop"}']
    packing = packing_of(tmp_path, ["\n".join(rows)], 8, "separate", suffix="jsonl")
    assert packing.num_samples == 2
    first, second = packing.at(0), packing.at(1)
    assert first["input_ids"].tolist() == [97, 98, 99, 257, 100, 101, 257, 257]
    assert first["labels"].tolist() == [-100, -100, 99, 257, -100, 101, 257, -100]
    assert first["document_ids"].tolist() == [0, 0, 0, 0, 1, 1, 1, 2]
    assert second["input_ids"].tolist() == [*b"fghijklm"]


def test_too_little_data_says_how_much_there_is(tmp_path):
    with pytest.raises(BadInput, match="holds 4 tokens, fewer than one sample of 64"):
        packing_of(tmp_path, ["abc"], 64)


def whole_step(packing, count, per_step, first):
    shares = [loader_of(packing, per_step, index, count, first).next()["input_ids"] for index in range(count)]
    return torch.cat(shares).tolist()


def test_a_step_holds_the_same_samples_in_every_layout_and_resumes_at_the_sample(tmp_path):
    packing = packing_of(tmp_path, ["".join(chr(97 + i % 26) for i in range(400))], 8)
    reference = loader_of(packing, 4)
    steps = [reference.next()["input_ids"].tolist() for _ in range(30)]  # several epochs of 50 samples
    for count in (1, 2, 4):
        for step in (0, 7, 29):
            assert whole_step(packing, count, 4, 4 * step) == steps[step]
    assert reference.samples == 120


def test_each_epoch_sees_every_sample_once(tmp_path):
    packing = packing_of(tmp_path, ["".join(chr(97 + i % 26) for i in range(80))], 8)
    for epoch in range(3):
        rows = {tuple(packing.sample(epoch * 10 + i)["input_ids"]) for i in range(10)}
        assert rows == {tuple(packing.at(i)["input_ids"]) for i in range(10)}


def test_workers_change_nothing_but_the_time(tmp_path):
    packing = packing_of(tmp_path, ["x" * 50 + "y" * 200], 8)
    plain, threaded = loader_of(packing, 2), loader_of(packing, 2, workers=3, prefetch=4)
    for _ in range(12):
        a, b = plain.next(), threaded.next()
        assert all(torch.equal(a[key], b[key]) for key in a)
    assert threaded.samples == plain.samples == 24
    assert threaded.waited[1] >= threaded.waited[0] > 0
    threaded.close()


def test_an_error_in_a_data_thread_is_raised_in_the_training_thread(tmp_path, monkeypatch):
    packing = packing_of(tmp_path, ["x" * 100], 8)
    loader = loader_of(packing, 2, workers=1)

    def broken(self, k):
        raise BadInput("sample is damaged")

    monkeypatch.setattr(type(packing), "sample", broken)
    with pytest.raises(BadInput, match="sample is damaged"):
        loader.next()
    loader.close()


def test_ranks_that_differ_only_in_model_axes_share_samples():
    layout = Layout(dp_replicate=2, dp_shard=2, tp=2)
    assert [share_of(layout, rank).index for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    other = Layout(dp_replicate=2, dp_shard=2, tp=2, order=("tp", "dp_replicate", "dp_shard", "pp", "cp"))
    assert [share_of(other, rank).index for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
