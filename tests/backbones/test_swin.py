from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from vitdet.backbones.swin import SWIN, PatchMerging, Swin, resample_table
from vitdet.core.blocks import DropPath
from vitdet.core.windows import ContinuousBias, TableBias


def small(**overrides) -> Swin:
    numbers = {
        "width": 16,
        "depths": (1, 2, 2, 1),
        "heads": (1, 2, 2, 4),
        "window": 4,
        "image_size": (64, 64),
        **overrides,
    }
    return Swin(**numbers)


# Millions of parameters by the papers' tables, which count a head for 1,000 classes: arXiv 2103.14030, table 1 a and b;
# arXiv 2111.09883, table 4, for B and L of version 2; its T and S have those of version 1 there and here.
@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("swin_tiny_patch4_window7_224", 28),
        ("swin_small_patch4_window7_224", 50),
        ("swin_base_patch4_window7_224", 88),
        ("swin_base_patch4_window12_384", 88),
        ("swin_large_patch4_window7_224", 197),
        ("swin_large_patch4_window12_384", 197),
        ("swinv2_tiny_window8_256", 28),
        ("swinv2_tiny_window16_256", 28),
        ("swinv2_small_window8_256", 50),
        ("swinv2_small_window16_256", 50),
        ("swinv2_base_window8_256", 88),
        ("swinv2_base_window16_256", 88),
        ("swinv2_base_window12_192", 88),
        ("swinv2_base_window12to16_192to256", 88),
        ("swinv2_base_window12to24_192to384", 88),
        ("swinv2_large_window12_192", 197),
        ("swinv2_large_window12to16_192to256", 197),
        ("swinv2_large_window12to24_192to384", 197),
    ],
)
def test_sizes_are_the_papers(name: str, millions: int) -> None:
    with torch.device("meta"):
        model = SWIN[name]()
    head = (model.channels[-1] + 1) * 1000
    assert round((sum(p.numel() for p in model.parameters()) + head) / 1e6) == millions
    assert not list(model.buffers()), "what is computed must not be lost on the meta device"


def test_every_name_has_its_size() -> None:
    assert len(SWIN) == 18


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("size", [(64, 64), (68, 100), (32, 36)])
def test_maps_of_any_size(version: int, size: tuple[int, int]) -> None:
    model = small(version=version).eval()
    assert model.strides == [4, 8, 16, 32]
    assert model.channels == [16, 32, 64, 128]
    images = torch.randn(2, 3, *size)
    with torch.no_grad():
        maps = model(images)
        tokens = model.tokens(images)
    sides = [(-(-size[0] // stride), -(-size[1] // stride)) for stride in model.strides]
    assert [tuple(m.shape) for m in maps] == [(2, c, *side) for c, side in zip(model.channels, sides, strict=True)]
    torch.testing.assert_close(tokens, model.norm(maps[-1].flatten(2).transpose(1, 2)))


def test_a_batch_equals_its_images() -> None:
    model = small().eval()
    images = torch.randn(3, 3, 64, 96)
    with torch.no_grad():
        together = model.tokens(images)
        torch.testing.assert_close(together, torch.cat([model.tokens(image[None]) for image in images]))


def test_chosen_stages_are_given_in_their_order_and_later_ones_not_built() -> None:
    model = small(out_stages=(2, 0)).eval()
    assert (model.channels, model.strides, len(model.stages)) == ([64, 16], [16, 4], 3)
    maps = model(torch.randn(1, 3, 64, 64))
    assert [tuple(m.shape[1:]) for m in maps] == [(64, 4, 4), (16, 16, 16)]
    assert model.depth == 1 + 2 + 2 + 1


def test_maps_with_norms() -> None:
    model = small(out_norms=True, out_stages=(1, 3)).eval()
    images = torch.randn(1, 3, 64, 64)
    maps = model(images)
    for level in maps:
        torch.testing.assert_close(level.mean(1), torch.zeros_like(level[:, 0]), atol=1e-5, rtol=0)
    torch.testing.assert_close(maps[-1].flatten(2).transpose(1, 2), model.tokens(images))
    assert {name for name, _ in model.named_parameters() if "norms" in name} == {
        "out_norms.1.weight",
        "out_norms.1.bias",
    }
    sum(level.square().sum() for level in maps).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_state_with_norms_differs_by_the_earlier_stages_norms_only() -> None:
    plain, normed = small().state_dict(), small(out_norms=True).state_dict()
    assert set(normed) - set(plain) == {f"out_norms.{i}.{part}" for i in range(3) for part in ("weight", "bias")}
    assert set(plain) <= set(normed)


@pytest.mark.parametrize("norm_last", [False, True])
def test_merging_takes_neighbours_column_by_column(norm_last: bool) -> None:
    merge = PatchMerging(1, norm_last=norm_last)
    merge.norm = nn.Identity()
    with torch.no_grad():
        merge.reduction.weight.copy_(torch.tensor([[1.0, 10, 100, 1000], [0, 0, 0, 0]]))
    tokens = torch.tensor([1.0, 2, 3, 4, 5, 6]).view(1, 6, 1)  # 2×3, so that a column of zeros joins
    assert merge(tokens, (2, 3))[0, :, 0].tolist() == [1 + 40 + 200 + 5000, 3 + 60]


def test_merging_norms_before_or_after() -> None:
    first, last = (PatchMerging(4, norm_last=choice) for choice in (False, True))
    assert (first.norm.normalized_shape, last.norm.normalized_shape) == ((16,), (8,))
    out = last(torch.randn(1, 4, 4), (2, 2))
    torch.testing.assert_close(out.mean(-1), torch.zeros(1, 1), atol=1e-6, rtol=0)


def test_version_2_starts_as_the_identity() -> None:
    model = small(version=2)
    tokens = torch.randn(1, 64, 32)
    assert torch.equal(model.stages[1](tokens, grid=(8, 8)), tokens)
    assert not torch.equal(small().stages[1](tokens, grid=(8, 8)), tokens)


def test_windows_shift_in_every_other_block() -> None:
    model = small(depths=(3, 2, 2, 1))
    shifted = [[block.self_attention.shifted for block in stage.layers] for stage in model.stages]
    assert shifted == [[False, True, False], [False, True], [False, True], [False]]


def test_windows_are_cut_to_the_image() -> None:
    windows = [stage.layers[0].self_attention.window for stage in small(window=7, image_size=(96, 160)).stages]
    assert windows == [(7, 7), (7, 7), (6, 7), (3, 5)]
    windows = [stage.layers[0].self_attention.window for stage in SWIN["swinv2_tiny_window16_256"](width=24).stages]
    assert windows == [(16, 16), (16, 16), (16, 16), (8, 8)]


def test_offsets_stay_relative_to_the_pretrained_windows() -> None:
    images = torch.randn(1, 3, 128, 128)
    before = small(version=2, image_size=(64, 64)).eval()
    with torch.no_grad():
        for name, parameter in before.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if name.endswith("bias") else 0.05))
    after = {
        windows: small(version=2, window=8, image_size=(128, 128), pretrained_windows=windows).eval()
        for windows in ((4, 4, 4, 2), None)
    }
    for model in after.values():
        model.load_state_dict(before.state_dict())
    biases = [next(m for m in model.modules() if isinstance(m, ContinuousBias)) for model in (before, *after.values())]
    old, kept, own = (bias((4, 4)) for bias in biases)
    torch.testing.assert_close(kept, old)
    assert not torch.allclose(own, old, atol=1e-3)
    with torch.no_grad():
        assert not torch.allclose(after[4, 4, 4, 2].tokens(images), after[None].tokens(images), atol=1e-3)


def test_stochastic_depth_grows_over_all_blocks() -> None:
    model = small(drop_path=0.5)
    rates = [m.rate for m in model.modules() if isinstance(m, DropPath)][::2]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5])
    images = torch.randn(8, 3, 32, 32)
    assert not torch.equal(model.tokens(images), model.tokens(images))
    model.eval()
    assert torch.equal(model.tokens(images), model.tokens(images))


def test_layers_are_numbered_from_the_image_on() -> None:
    model = small(out_norms=True)
    assert model.depth == 7
    names = [name for name, _ in model.named_parameters()]
    depths = {name: model.depth_of(name) for name in names}
    assert set(depths.values()) == set(range(8))
    assert {name for name in names if depths[name] == 0} == {n for n in names if n.startswith("embed")}
    assert depths["stages.1.layers.0.self_attention_residual.norm.weight"] == 2
    assert depths["stages.3.layers.0.self_attention.position_bias.table"] == 6
    assert depths["merges.0.reduction.weight"] == 1  # with the block before it
    assert depths["merges.2.norm.bias"] == 5
    assert depths["norm.weight"] == depths["out_norms.0.weight"] == 7


def test_tables_and_scales_escape_weight_decay() -> None:
    for version in (1, 2):
        names = [name for name, _ in small(version=version).named_parameters()]
        decayed = {name.rsplit(".", 1)[1] for name in names if name.endswith("weight")}
        spared = {name.rsplit(".", 1)[1] for name in names} - decayed
        assert spared == ({"bias", "table"} if version == 1 else {"bias", "log_scale"})


def test_adapted_state_fits_another_window() -> None:
    old, new = small(window=4, image_size=(64, 64)), small(window=7, image_size=(112, 168))
    for module in old.modules():
        if isinstance(module, TableBias):
            nn.init.constant_(module.table, 0.25)
    with pytest.raises(RuntimeError, match="size mismatch"):
        new.load_state_dict(old.state_dict())
    new.load_state_dict(new.adapt(old.state_dict()))
    for module in new.modules():
        if isinstance(module, TableBias):
            torch.testing.assert_close(module.table, torch.full_like(module.table, 0.25))
    assert torch.equal(new.embed.project.weight, old.embed.project.weight)


def test_adapting_changes_nothing_that_fits() -> None:
    for model in (small(), small(version=2)):
        state = model.state_dict()
        adapted = model.adapt(state)
        assert adapted.keys() == state.keys()
        assert all(torch.equal(adapted[name], state[name]) for name in state)
    larger = small(version=2, window=8, image_size=(128, 128))
    larger.load_state_dict(larger.adapt(state))


def test_resampled_table_keeps_the_place_of_its_offsets() -> None:
    down = torch.arange(-3.0, 4).repeat_interleave(7)  # a window of 4: offsets -3 … 3, row-major
    table = torch.stack([down, torch.arange(-3.0, 4).repeat(7)], dim=1)
    grown = resample_table(table, (6, 5)).view(11, 9, 2)
    assert grown[5, 4].abs().max() < 1e-5
    assert (grown[1:, :, 0] > grown[:-1, :, 0]).all()
    assert (grown[:, 1:, 1] > grown[:, :-1, 1]).all()
    torch.testing.assert_close(grown, -grown.flip(0, 1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"version": 3}, "there is no Swin version 3; use 1 or 2"),
        ({"window": 0}, "at least 1, got 0"),
        ({"image_size": (64,)}, r"\(height, width\) in pixels, got \(64,\)"),
        ({"heads": (1, 2)}, "equally many, got 2 and 4"),
        ({"out_stages": (1, 4)}, r"stages from 0 to 3, got \[1, 4\]"),
        ({"out_stages": ()}, r"stages from 0 to 3, got \[\]"),
        ({"pretrained_windows": (4, 4, 4, 2)}, "of version 2 only"),
        ({"version": 2, "pretrained_windows": (4, 4)}, r"one a stage, of version 2 only, got \[4, 4\]"),
    ],
)
def test_what_cannot_be_built(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(**arguments)


def test_images_that_patches_do_not_tile() -> None:
    with pytest.raises(ValueError, match="do not tile 64×66; pad or resize"):
        small()(torch.randn(1, 3, 64, 66))


def test_table_of_a_window_that_is_not_square() -> None:
    with pytest.raises(ValueError, match="table of 35 rows is not of a square window"):
        resample_table(torch.zeros(35, 2), (4, 4))


def test_training_after_inference_mode() -> None:
    model = small()
    images: Tensor = torch.randn(1, 3, 64, 64)
    with torch.inference_mode():
        model(images)
    model.tokens(images).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
