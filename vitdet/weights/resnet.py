"""Plain ResNet weights in other people's layouts: torchvision's, which timm and DETR share, and Hugging Face's."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from vitdet.errors import UserError
from vitdet.weights.rules import Rules, convert_state_dict

# Names may stand below a detector's ``backbone.``. Theirs count from 1, ours from 0.
TORCHVISION_RULES: Rules = [
    (r"^(backbone\.)?conv1\.", r"\1stem.0.conv."),
    (r"^(backbone\.)?bn1\.", r"\1stem.0.norm."),
    *((rf"^(backbone\.)?layer{n}\.", rf"\1stages.{n - 1}.") for n in (1, 2, 3, 4)),
    *((rf"^((?:backbone\.)?stages\.\d+\.\d+)\.conv{n}\.", rf"\1.convs.{n - 1}.conv.") for n in (1, 2, 3)),
    *((rf"^((?:backbone\.)?stages\.\d+\.\d+)\.bn{n}\.", rf"\1.convs.{n - 1}.norm.") for n in (1, 2, 3)),
    (r"^((?:backbone\.)?stages\.\d+\.\d+)\.downsample\.0\.", r"\1.shortcut.conv."),
    (r"^((?:backbone\.)?stages\.\d+\.\d+)\.downsample\.1\.", r"\1.shortcut.norm."),
]

HUGGINGFACE_RULES: Rules = [
    (r"^(backbone\.)?embedder\.embedder\.", r"\1stem.0."),
    (r"^(backbone\.)?encoder\.stages\.(\d+)\.layers\.(\d+)\.layer\.(\d+)\.", r"\1stages.\2.\3.convs.\4."),
    (r"^(backbone\.)?encoder\.stages\.(\d+)\.layers\.(\d+)\.", r"\1stages.\2.\3."),
    (r"^((?:backbone\.)?(?:stem|stages)\..*)\.convolution\.", r"\1.conv."),
    (r"^((?:backbone\.)?(?:stem|stages)\..*)\.normalization\.", r"\1.norm."),
]


def convert(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a plain ResNet classifier, without its head, under the names of our backbone.

    Raises:
        UserError: the names are of another layout.
    """
    if "layer4.0.conv1.weight" in state:
        return convert_state_dict(state, [(r"^fc\.", None), *TORCHVISION_RULES])
    if any(name.startswith("resnet.encoder.stages.") for name in state):
        return convert_state_dict(state, [(r"^classifier\.", None), (r"^resnet\.", ""), *HUGGINGFACE_RULES])
    raise UserError(
        f"the weights are no plain ResNet's (the first is {next(iter(state), 'missing')!r}); pass a file such as "
        "torchvision's resnet50-0676ba61.pth"
    )
