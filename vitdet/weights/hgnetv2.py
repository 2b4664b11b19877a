"""HGNetV2 weights in other people's layouts: rules for the names below ``backbone.``, which several detectors share."""

from __future__ import annotations

from vitdet.weights.rules import Rules

_SHARED: Rules = [
    (r"^backbone\.stem\.stem1\.", "backbone.stem.enter."),
    (r"^backbone\.stem\.stem2a\.", "backbone.stem.narrow."),
    (r"^backbone\.stem\.stem2b\.", "backbone.stem.widen."),
    (r"^backbone\.stem\.stem3\.", "backbone.stem.merge."),
    (r"^backbone\.stem\.stem4\.", "backbone.stem.leave."),
    (r"^(backbone\.stages\..+)\.aggregation\.", r"\1.aggregate."),
    (r"^(backbone\.stages\..+)\.aggregation_squeeze_conv\.", r"\1.aggregate.0."),  # RT-DETRv2's own names
    (r"^(backbone\.stages\..+)\.aggregation_excitation_conv\.", r"\1.aggregate.1."),
    (r"^(backbone\.stem\.(?:narrow|widen)\.conv)\.1\.", r"\1."),  # after a padding that is a layer there
    (r"^(backbone\.stages\..+\.layers\.\d+)\.conv1\.", r"\1.0."),  # light layers
    (r"^(backbone\.stages\..+\.layers\.\d+)\.conv2\.", r"\1.1."),
    (r"^(backbone\.st.+)\.lab\.", r"\1.affine."),
]
# D-FINE, DEIM, DEIMv2 and RT-DETRv2, which calls some parts otherwise; the backbone's own files
# (PPHGNetV2_B0_stage1.pth, …) lack the ``backbone.``.
OFFICIAL_RULES: Rules = [
    (r"^(stem\.stem|stages\.\d+\.(?:blocks|downsample)\.)", r"backbone.\1"),
    (r"^(backbone\.st.+)\.bn\.", r"\1.norm."),
    *_SHARED,
]
# ``backbone.model.embedder.…`` (RT-DETR, D-FINE) or ``backbone.embedder.…``: what lies before is cut off already.
HUGGINGFACE_RULES: Rules = [
    (r"^backbone\.(?:model\.)?embedder\.", "backbone.stem."),
    (r"^backbone\.(?:model\.)?encoder\.stages\.", "backbone.stages."),
    (r"^(backbone\.st.+)\.convolution\.", r"\1.conv."),
    (r"^(backbone\.st.+)\.normalization\.", r"\1.norm."),
    *_SHARED,
]
