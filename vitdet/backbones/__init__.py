"""Image -> feature maps: ``forward(images) -> list[Tensor]``, with ``.channels`` and ``.strides``."""
