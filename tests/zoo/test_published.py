"""Published weights by ``model:tag``, and the listing of the models."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vitdet.cli import main
from vitdet.errors import UserError
from vitdet.weights.files import FORMATS
from vitdet.zoo import CLASSIFIERS, DETECTORS
from vitdet.zoo.published import (
    PUBLISHED,
    describe_models,
    find_published,
    format_table,
    locate_source,
    weights_of,
)

# COCO AP and GFLOPs of the tables in arXiv 2005.12872, 2304.08069, 2407.17140, 2410.13842 and 2509.20787.
COCO = {
    "detr_r50": (42.0, 86), "detr_r50_dc5": (43.3, 187), "detr_r101": (43.5, 152), "detr_r101_dc5": (44.9, 253),
    "rtdetr_r18": (46.4, 60), "rtdetr_r34": (48.9, 92), "rtdetr_r50_m": (51.3, 100), "rtdetr_r50": (53.1, 136),
    "rtdetr_r101": (54.3, 259), "rtdetr_hgnetv2_l": (52.9, 110), "rtdetr_hgnetv2_x": (54.7, 234),
    "rtdetrv2_r18": (48.1, 60), "rtdetrv2_r34": (49.9, 92), "rtdetrv2_r50_m": (51.9, 100), "rtdetrv2_r50": (53.4, 136),
    "rtdetrv2_r101": (54.3, 259), "rtdetrv2_hgnetv2_l": (52.9, 110), "rtdetrv2_hgnetv2_x": (54.7, 234),
    "dfine_n": (42.8, 7), "dfine_s": (48.5, 25), "dfine_m": (52.3, 57), "dfine_l": (54.0, 91), "dfine_x": (55.8, 202),
    "deimv2_atto": (23.8, 0.8), "deimv2_femto": (31.0, 1.7), "deimv2_pico": (38.5, 5.2), "deimv2_n": (43.0, 6.8),
    "deimv2_s": (50.9, 25.6), "deimv2_m": (53.0, 52.2), "deimv2_l": (56.0, 96.7), "deimv2_x": (57.8, 151.6),
}  # fmt: skip


def test_every_model_of_the_table_exists() -> None:
    assert {key.partition(":")[0] for key in PUBLISHED} <= DETECTORS.keys()


def test_the_published_figures() -> None:
    """Against the papers' tables, so that a slip of the pen in one of the two places shows."""
    found = {key.removesuffix(":coco"): (e.ap, e.gflops) for key, e in PUBLISHED.items() if key.endswith(":coco")}
    assert found == COCO


@pytest.mark.parametrize("key", PUBLISHED)
def test_an_entry_is_in_order(key: str) -> None:
    entry = PUBLISHED[key]
    model, tag = key.split(":")
    assert tag in {"coco", "objects365", "objects365_coco", "coco_discrete"}
    assert (entry.ap is None) == (tag == "objects365")
    assert entry.gflops == COCO[model][1]
    assert entry.licence.startswith("Apache-2.0")
    assert entry.source
    if entry.address.startswith("https://"):
        assert entry.address.endswith(FORMATS)
    else:
        assert re.fullmatch(r"Intellindust/DEIMv2_(HGNetv2|DINOv3)_[A-Z]+_COCO", entry.address)
    # A publisher who puts the checksum into the name does so before the ending.
    written = re.search(r"-([0-9a-f]{8,})\.", entry.address)
    assert entry.sha256 == (written[1] if written else None)
    # By this alone is it known how the model samples: its weights have the shapes of the other's.
    assert ("_dsp_" in entry.address) == (tag == "coco_discrete")


def test_no_two_files_have_one_name() -> None:
    """The cache goes by it."""
    addresses = {entry.address for entry in PUBLISHED.values()}
    assert len({address.rpartition("/")[2] for address in addresses}) == len(addresses)
    # The same arithmetic under two names: both versions of RT-DETR on HGNetv2 have the second's files.
    assert len(addresses) == len(PUBLISHED) - 2


def test_a_name_is_found() -> None:
    assert find_published("rtdetr_r50:coco") == ("rtdetr_r50", PUBLISHED["rtdetr_r50:coco"])
    assert list(weights_of("rtdetr_r18")) == ["coco", "objects365", "objects365_coco"]
    assert list(weights_of("rtdetr_r34")) == ["coco"]
    assert weights_of("rtdetr_nano") == {}


@pytest.mark.parametrize(
    "source",
    [
        "best.safetensors", "runs/a:b/best.pth", "timm/vit_tiny_patch16_224.augreg_in21k", "owner/name@v1",
        "rtdetr_nano", "https://dl.fbaipublicfiles.com/detr/detr-r50-e632da11.pth", "C:\\weights\\a.pth",
        "vit_tiny_patch16_224",
    ],
)  # fmt: skip
def test_other_sources_are_left_alone(source: str) -> None:
    assert find_published(source) is None
    assert find_published(Path(source)) is None


def test_what_is_here_is_not_looked_for_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rtdetr_r18:coco").touch()
    assert find_published("rtdetr_r18:coco") is None


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("rtdetr_r18:lvis",
         "there are no weights 'lvis' of 'rtdetr_r18'; known: coco, objects365, objects365_coco"),
        ("rtdetr_r19:coco", "there is no model 'rtdetr_r19'; did you mean 'rtdetr_r18'?"),
        ("rtdetr_nano:coco", "no weights of 'rtdetr_nano' are published; pass a file of your own training"),
        ("rtdetrv2_r34",
         "'rtdetrv2_r34' names a model without weights; pass rtdetrv2_r34:coco or rtdetrv2_r34:coco_discrete"),
    ],
)  # fmt: skip
def test_names_of_nothing(source: str, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        find_published(source)
    assert str(error.value) == sentence


# ------------------------------------------------------------------------------------------------ the files


@pytest.fixture
def checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of torch.hub, an empty cache of the Hub beside it, and no network."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "_hub_dir", None)
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


def test_a_file_put_there_by_hand(checkpoints: Path) -> None:
    path = checkpoints / "rtdetr_r34vd_dec4_6x_coco_from_paddle.pth"
    with pytest.raises(UserError) as error:
        locate_source("rtdetr_r34:coco")
    address = f"https://github.com/lyuwenyu/storage/releases/download/v0.1/{path.name}"
    assert str(error.value) == (
        f"HF_HUB_OFFLINE is set and {path} is not there; fetch {address} by hand, and put it at {path}"
    )
    path.write_bytes(b"weights")
    assert locate_source("rtdetr_r34:coco") == (path, "rtdetr_r34")
    assert locate_source("rtdetr_r34:coco", model="rtdetr_r34") == (path, "rtdetr_r34")
    with pytest.raises(UserError, match=r"^rtdetr_r34:coco holds a 'rtdetr_r34', not a 'rtdetr_r50'; name"):
        locate_source("rtdetr_r34:coco", model="rtdetr_r50")


def test_its_checksum_counts(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoints / "dfine_n_coco.pth"
    path.write_bytes(b"weights")
    monkeypatch.setitem(PUBLISHED, "dfine_n:coco", replace(PUBLISHED["dfine_n:coco"], sha256="e632da11"))
    with pytest.raises(UserError, match=r"dfine_n_coco\.pth has not the published checksum e632da11; delete it"):
        locate_source("dfine_n:coco")
    checksum = hashlib.sha256(b"weights").hexdigest()[:8]
    monkeypatch.setitem(PUBLISHED, "dfine_n:coco", replace(PUBLISHED["dfine_n:coco"], sha256=checksum))
    assert locate_source("dfine_n:coco") == (path, "dfine_n")


def test_a_repository_without_a_network(checkpoints: Path) -> None:
    repo = "Intellindust/DEIMv2_HGNetv2_ATTO_COCO"
    with pytest.raises(UserError, match=rf"^{repo} is not in the cache .* from .*/{repo}/tree/main by hand"):
        locate_source("deimv2_atto:coco")


def test_other_sources_keep_the_callers_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.pth"
    path.touch()
    assert locate_source(path) == (path, None)
    assert locate_source(str(path), model="rtdetr_r18") == (path, "rtdetr_r18")


# --------------------------------------------------------------------------------------------- the listing


def test_models_are_described() -> None:
    described = describe_models("rtdetr_*")
    assert list(described) == sorted(name for name in DETECTORS if name.startswith("rtdetr_"))
    r18 = described["rtdetr_r18"]
    assert abs(r18["parameters"] / 1e6 - 20) < 0.5
    assert r18["gflops"] == 60
    assert list(r18["weights"]) == ["coco", "objects365", "objects365_coco"]
    assert described["rtdetr_nano"]["gflops"] is None
    assert described["rtdetr_nano"]["weights"] == {}


def test_every_model_can_be_described() -> None:
    described = describe_models()
    assert described.keys() == DETECTORS.keys() | CLASSIFIERS.keys()
    assert json.loads(json.dumps(described)).keys() == described.keys()
    assert sum(len(model["weights"]) for model in described.values()) == sum(
        key.partition(":")[0] in DETECTORS for key in PUBLISHED
    )


def test_the_table() -> None:
    lines = format_table(describe_models("rtdetr_r[15]*")).splitlines()
    assert lines[0].split() == ["model", "parameters", "GFLOPs", "AP", "licence", "weights", "address", "(checksum)"]
    rows = [line.split() for line in lines[1:]]
    assert rows[0][:5] == ["rtdetr_r101", "76.66", "M", "259", "54.3"]
    assert [row[-2] for row in rows] == [key for key in sorted(PUBLISHED) if re.match(r"rtdetr_r[15]", key)]
    assert [row[-1] for row in rows] == [PUBLISHED[row[-2]].address for row in rows]
    detr = format_table(describe_models("detr_r50"))
    assert detr.endswith("  https://dl.fbaipublicfiles.com/detr/detr-r50-e632da11.pth (sha256 e632da11…)")
    # What is told of a model is told once; the columns stand below their titles.
    assert [row[0] for row in rows[:3]] == ["rtdetr_r101", "Apache-2.0", "56.2"]
    assert {line.index("Apache-2.0") for line in lines[1:]} == {lines[0].index("licence")}


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["models", "rtdetrv2_r34", "--json", str(tmp_path / "models.json")]) == 0
    assert "rtdetrv2_r34:coco_discrete" in capsys.readouterr().out
    entry = json.loads((tmp_path / "models.json").read_text())["rtdetrv2_r34"]["weights"]["coco_discrete"]
    assert entry["address"].endswith("/v0.1/rrtdetrv2_r34vd_dsp_1x_coco.pth")
    assert (entry["ap"], entry["sha256"], entry["image_size"]) == (49.2, None, [640, 640])
    assert main(["models", "rtdetr_r8"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "vitdet: no model matches 'rtdetr_r8'; did you mean 'rtdetr_r18'?\n"
