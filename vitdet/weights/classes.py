"""The class names of published detectors, which their files leave out."""

from __future__ import annotations

from collections.abc import Sequence

NO_CLASS = "N/A"  # what a published head's row is called for a category id that nothing has

# COCO's category ids -> names (cocodataset.org, instances of 2014 and 2017). Eleven numbers below 91 are no id.
COCO: dict[int, str] = {
    1: "person", 2: "bicycle", 3: "car", 4: "motorcycle", 5: "airplane", 6: "bus", 7: "train", 8: "truck", 9: "boat",
    10: "traffic light", 11: "fire hydrant", 13: "stop sign", 14: "parking meter", 15: "bench", 16: "bird", 17: "cat",
    18: "dog", 19: "horse", 20: "sheep", 21: "cow", 22: "elephant", 23: "bear", 24: "zebra", 25: "giraffe",
    27: "backpack", 28: "umbrella", 31: "handbag", 32: "tie", 33: "suitcase", 34: "frisbee", 35: "skis",
    36: "snowboard", 37: "sports ball", 38: "kite", 39: "baseball bat", 40: "baseball glove", 41: "skateboard",
    42: "surfboard", 43: "tennis racket", 44: "bottle", 46: "wine glass", 47: "cup", 48: "fork", 49: "knife",
    50: "spoon", 51: "bowl", 52: "banana", 53: "apple", 54: "sandwich", 55: "orange", 56: "broccoli", 57: "carrot",
    58: "hot dog", 59: "pizza", 60: "donut", 61: "cake", 62: "chair", 63: "couch", 64: "potted plant", 65: "bed",
    67: "dining table", 70: "toilet", 72: "tv", 73: "laptop", 74: "mouse", 75: "remote", 76: "keyboard",
    77: "cell phone", 78: "microwave", 79: "oven", 80: "toaster", 81: "sink", 82: "refrigerator", 84: "book",
    85: "clock", 86: "vase", 87: "scissors", 88: "teddy bear", 89: "hair drier", 90: "toothbrush",
}  # fmt: skip


def coco_names() -> list[str]:
    """COCO's 80 names in the order of their ids, as RT-DETR and its descendants count them."""
    return list(COCO.values())


def coco_names_by_id() -> list[str]:
    """The 91 names of a head whose rows are category ids, as DETR has it; :data:`NO_CLASS` where there is none."""
    return [COCO.get(category, NO_CLASS) for category in range(91)]


# What descriptions of RT-DETR and its descendants call six of COCO's classes, as Pascal VOC did.
_ALIASES = {
    "motorbike": "motorcycle", "aeroplane": "airplane", "sofa": "couch", "pottedplant": "potted plant",
    "diningtable": "dining table", "tvmonitor": "tv",
}  # fmt: skip


def as_coco(names: Sequence[str]) -> list[str]:
    """These names; where they are COCO's in other words, COCO's own, or its data could not be told to fit.

    Where they are by id, what was planned for the unused ids becomes :data:`NO_CLASS`: Hugging Face's descriptions call
    them "street sign", "hat", …, though no image has any.
    """
    told = [_ALIASES.get(name, name) for name in names]
    if told == coco_names():
        return told
    ours = coco_names_by_id()
    same = len(told) == len(ours) and all(told[category] == name for category, name in COCO.items())
    return ours if same else list(names)


def category_ids(names: Sequence[str]) -> tuple[int, ...]:
    """The ids under which results are written: COCO's for its 80 classes, else 0…K-1."""
    return tuple(COCO) if list(names) == coco_names() else tuple(range(len(names)))
