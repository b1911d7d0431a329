"""Checkpoints from elsewhere whose checksums are right and whose content is not: refused, on all ranks, without a traceback."""

import json

import msgspec
import pytest
import torch
from tests.engine.test_checkpoint import SmallRun

from fullstride.engine import checkpoint_folder
from fullstride.engine.checkpoint import load_run, save_run
from fullstride.engine.checkpoint_folder import MANIFEST, Manifest, Stored, check_files, crc32, rank_file, signed
from fullstride.errors import BadInput, EnvironmentFault
from fullstride.files import read_json, write_json

FILE = rank_file(0)
KEY = "weights/a@0,0"


@pytest.fixture
def saved(tmp_path):
    run = SmallRun()
    run.step()
    save_run(run, tmp_path / "saved")
    return tmp_path / "saved"


def signed_again(folder, **changes):
    """Sizes, checksums and digest as they ought to be for what is there."""
    manifest = read_json(folder / MANIFEST, Manifest)
    files = {FILE: Stored(size=(folder / FILE).stat().st_size, crc32=crc32(folder / FILE))}
    (folder / MANIFEST).unlink()
    write_json(folder / MANIFEST, signed(msgspec.structs.replace(manifest, **{"files": files, **changes})))


def rewritten(folder, edit):
    raw = (folder / FILE).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    table = json.loads(raw[8 : 8 + length])
    made = edit(table)
    head = made if isinstance(made, bytes) else json.dumps(table).encode()
    (folder / FILE).write_bytes(len(head).to_bytes(8, "little") + head + raw[8 + length :])
    signed_again(folder)


HEADERS = {
    "another_number_of_dims": (lambda t: t.update({"weights/a@0": {**t.pop(KEY), "shape": [256]}}), "of other dims than"),
    "missing": (lambda t: t.pop(KEY) and None, "holds 0 of 256 elements of weights/a"),
    "behind_the_end": (lambda t: t.update({"weights/a@64,0": t.pop(KEY)}), "holds 0 of 256 elements of weights/a"),
    "before_the_beginning": (lambda t: t.update({"weights/a@-1,0": t.pop(KEY)}), "does not lie inside the file"),
    "larger_than_the_file": (lambda t: t[KEY].update(shape=[10**18, 4]), "does not lie inside the file"),
    "no_offsets": (lambda t: t.update({"weights/a@x": t.pop(KEY)}), "is damaged"),
    "unknown_dtype": (lambda t: t[KEY].update(dtype="F7"), "is damaged"),
    "words_for_numbers": (lambda t: t[KEY].update(data_offsets=["a", "b"]), "is damaged"),
    "nothing_for_an_entry": (lambda t: t.update({KEY: None}), "is damaged"),
    "no_table": (lambda t: b"[1, 2]", "is damaged"),
    "no_json": (lambda t: b"{{{", "is damaged"),
    "nested_without_end": (lambda t: b"[" * 100_000, "is damaged"),
}


@pytest.mark.parametrize("what", sorted(HEADERS))
def test_a_header_is_not_believed(what, saved):
    edit, words = HEADERS[what]
    rewritten(saved, edit)
    with pytest.raises(BadInput, match=words) as caught:
        load_run(SmallRun(), saved)
    assert "\n" not in caught.value.message and str(saved) in caught.value.message


@pytest.mark.parametrize("size", [0, 4, 100])
def test_files_cut_short_whose_checksum_was_made_again_are_refused(size, saved):
    (saved / FILE).write_bytes((saved / FILE).read_bytes()[:size])
    signed_again(saved)
    with pytest.raises(BadInput, match=rf"{FILE}: is damaged"):
        load_run(SmallRun(), saved)


@pytest.mark.parametrize("change", [{"step": -1}, {"samples": -1}, {"world_size": 0}])
def test_positions_that_cannot_be_are_refused(change, saved):
    signed_again(saved, **change)
    with pytest.raises(BadInput, match=r"manifest\.json: step .* samples and .* ranks cannot be"):
        load_run(SmallRun(), saved)


def test_files_outside_the_folder_are_not_read(saved):
    manifest = read_json(saved / MANIFEST, Manifest)
    signed_again(saved, files={f"../saved/{FILE}": manifest.files[FILE]})
    with pytest.raises(BadInput, match="is missing"):
        load_run(SmallRun(), saved)


def test_a_disk_that_refuses_to_read_is_a_value_for_all_ranks(saved, monkeypatch):
    """A rank that raised by itself would leave the others waiting for its word."""

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(checkpoint_folder, "crc32", refuse)
    assert check_files(saved).message == f"{saved / FILE}: cannot be read (Permission denied)"
    (saved / FILE).unlink()
    (saved / FILE).mkdir()
    assert "is missing" in check_files(saved).message
    assert "Not a directory" in check_files(saved / MANIFEST).message


def test_a_folder_below_a_file_is_a_disk_that_may_not_be_written(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(EnvironmentFault, match=r"sub: not saved \(Not a directory\)"):
        save_run(SmallRun(), tmp_path / "file" / "sub")
    assert (tmp_path / "file").read_text() == "mine"


def test_what_is_right_is_read(saved):
    run = SmallRun()
    signed_again(saved)
    load_run(run, saved)
    assert torch.count_nonzero(run.tensors["weights/a"]) > 0
