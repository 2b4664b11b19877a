"""A run's configuration as pydantic models: every key has a type and, where it makes sense, a default."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Probability = Field(default=0.0, ge=0, le=1)


class Section(BaseModel):
    """What all sections share: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def without_keys(cls, values: Any) -> Any:
        """A section with nothing below it has its defaults."""
        return {} if values is None else values


class ModelSection(Section):
    """Which model."""

    name: str = Field(description="of vitdet models")
    num_classes: int | None = Field(default=None, ge=1, description="taken from the data; a number only to check it")
    overrides: dict[str, Any] = Field(default_factory=dict, description="arguments of the model")
    weights: str | None = Field(default=None, description="what to start from: anything vitdet.load_model takes")
    backbone_weights: str | None = Field(
        default=None, description="what a detector's backbone starts from: a classifier's weights, whoever made them"
    )

    @model_validator(mode="after")
    def one_start(self) -> ModelSection:
        """A whole model's weights have its backbone's."""
        if self.weights is not None and self.backbone_weights is not None:
            raise ValueError("has weights and backbone_weights; keep the one that the run shall start from")
        return self


class DataSection(Section):
    """Where the images are and how they are read."""

    root: str
    train_split: str = "train"
    val_split: str = "val"
    size: tuple[int, int] = Field(description="(height, width) of training and evaluation")
    sizes: list[tuple[int, int]] = Field(default_factory=list, description="multi-scale: each batch draws one")
    mean: tuple[float, float, float] | None = Field(
        default=None, description="of RGB on [0, 1]; null: as model.weights want it, else the task's custom"
    )
    std: tuple[float, float, float] | None = None
    workers: int = Field(default=2, ge=0)
    cache: bool = Field(default=False, description="keep decoded images in memory")

    @field_validator("size")
    @classmethod
    def positive(cls, size: tuple[int, int]) -> tuple[int, int]:
        """Sides of an image; by what the model divides them is checked with the model."""
        if any(side < 1 for side in size):
            raise ValueError(f"must be (height, width) in pixels, got {list(size)}")
        return size

    @field_validator("sizes")
    @classmethod
    def all_positive(cls, sizes: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The same for every size."""
        return [cls.positive(size) for size in sizes]

    @field_validator("std")
    @classmethod
    def no_zero(cls, std: tuple[float, float, float] | None) -> tuple[float, float, float] | None:
        """It is divided by."""
        if std is not None and min(std) <= 0:
            raise ValueError(f"must be positive, got {list(std)}")
        return std


class DetectionDataSection(DataSection):
    """The same, and whether images keep their proportions."""

    longest: int | None = Field(
        default=None, ge=1,
        description="keep proportions: size, twice the same, is the shorter side and this the most of the longer; "
        "batches are padded, and each image draws from sizes",
    )  # fmt: skip

    @model_validator(mode="after")
    def shorter_sides(self) -> DetectionDataSection:
        """A shorter side is one number."""
        if self.longest is not None and any(h != w or h > self.longest for h, w in (self.size, *self.sizes)):
            raise ValueError("with longest has sizes that are the shorter side twice, as [800, 800], and at most that")
        return self


class ClassificationDataSection(DataSection):
    """The same, and the geometry of evaluation."""

    crop: float | None = Field(
        default=0.875, gt=0, le=1, description="share of the image that evaluation sees; null stretches"
    )
    interpolation: Literal["bilinear", "bicubic"] = "bicubic"


class AugmentSection(Section):
    """Probabilities of the augmentations; strong ones are on from ``strong_from`` to ``strong_until`` of the run."""

    photometric: float = Probability
    zoom_out: float = Probability
    iou_crop: float = Probability
    hflip: float = Probability
    vflip: float = Probability
    rotate90: float = Probability
    scale_jitter: tuple[float, float] = Field(default=(1.0, 1.0), description="range of the factor of size")
    size_crop: float = Field(default=0.0, ge=0, le=1, description="DETR's crop")
    mosaic: float = Probability
    mixup: float = Probability
    mix_from: float = Field(default=0.0, ge=0, le=1, description="share of the epochs before mosaic and mixup")
    mix_until: float | None = Field(
        default=None, ge=0, le=1, description="the one at which they end; strong_until where not given"
    )
    strong_from: float = Field(default=0.0, ge=0, le=1, description="share of the epochs before strong augmentation")
    strong_until: float = Field(
        default=0.9, ge=0, le=1, description="share of the epochs; data.sizes are drawn until then, too"
    )
    min_box: float = Field(default=1.0, ge=0, description="pixels; boxes with a shorter side are dropped")

    @model_validator(mode="after")
    def in_time(self) -> AugmentSection:
        """Mosaic and mixup begin before they end."""
        until = self.strong_until if self.mix_until is None else self.mix_until
        if (self.mosaic or self.mixup) and not self.mix_from < until <= self.strong_until:
            raise ValueError(
                "needs mix_from below mix_until, and that at most strong_until; "
                f"got {self.mix_from}, {until}, {self.strong_until}"
            )
        return self

    @field_validator("scale_jitter")
    @classmethod
    def ordered(cls, limits: tuple[float, float]) -> tuple[float, float]:
        """A range."""
        if not 0 < limits[0] <= limits[1]:
            raise ValueError(f"must be a range [low, high] of positive factors, got {list(limits)}")
        return limits


class ClassificationAugmentSection(Section):
    """Augmentation of whole images; all but crop and flip end at ``strong_until`` of the run."""

    scale: tuple[float, float] = Field(default=(0.08, 1.0), description="area of the random crop, shares of the image")
    ratio: tuple[float, float] = Field(default=(3 / 4, 4 / 3), description="its width over its height")
    hflip: float = Field(default=0.5, ge=0, le=1)
    rand_augment_layers: int = Field(default=0, ge=0, description="operations an image")
    rand_augment_magnitude: float = Field(default=9.0, ge=0, le=10)
    rand_augment_std: float = Field(default=0.5, ge=0, description="of the magnitude")
    three_augment: bool = Field(default=False, description="gray, solarize or blur (DeiT III)")
    colour_jitter: float = Field(default=0.0, ge=0, le=1)
    erasing: float = Probability
    mixup: float = Field(default=0.0, ge=0, description="alpha of its Beta distribution; 0 for none")
    cutmix: float = Field(default=0.0, ge=0, description="alpha of its Beta distribution; 0 for none")
    switch: float = Field(default=0.5, ge=0, le=1, description="probability of cutmix where both are on")
    mix: float = Field(default=1.0, ge=0, le=1, description="probability of mixing a batch at all")
    resize_only: bool = Field(default=False, description="no random crop: the middle of the image, as in evaluation")
    repeats: int = Field(default=1, ge=1, description="copies of an image in an epoch, differently augmented")
    strong_until: float = Field(default=1.0, ge=0, le=1, description="share of the epochs")

    @field_validator("scale", "ratio")
    @classmethod
    def ordered(cls, limits: tuple[float, float]) -> tuple[float, float]:
        """A range."""
        if not 0 < limits[0] <= limits[1]:
            raise ValueError(f"must be a range [low, high] of positive numbers, got {list(limits)}")
        return limits

    @field_validator("scale")
    @classmethod
    def at_most_all(cls, limits: tuple[float, float]) -> tuple[float, float]:
        """A crop is no larger than its image."""
        if limits[1] > 1:
            raise ValueError(f"must be shares of the image's area, at most 1, got {list(limits)}")
        return limits


class OptimSection(Section):
    """AdamW and its schedule."""

    lr: float = Field(default=1e-4, gt=0)
    backbone_lr: float | None = Field(default=None, gt=0, description="lr where not given")
    weight_decay: float = Field(default=1e-4, ge=0)
    layer_decay: float = Field(default=1.0, gt=0, le=1, description="rate of a backbone's layer over that of the next")
    betas: tuple[float, float] = (0.9, 0.999)
    schedule: Literal["constant", "cosine", "flat_cosine", "step"] = "cosine"
    flat: float = Field(default=0.5, ge=0, le=1, description="share of the run before flat_cosine or step falls")
    final: float = Field(default=0.0, ge=0, le=1, description="last learning rate over lr")
    settled: float = Field(default=0.0, ge=0, le=1, description="share of the run, its last, at the last learning rate")
    ramp: Literal["linear", "quadratic"] = Field(default="linear", description="how the rate grows in the warm-up")
    warmup: float = Field(default=0.05, ge=0, le=1, description="share of the run")
    warmup_steps: int = Field(default=2000, ge=0, description="at most")
    clip_norm: float = Field(default=0.1, ge=0, description="0 for none")


class LossSection(Section):
    """Weights of the losses and of the matching cost."""

    classification: Literal["vfl", "mal", "ce"] | None = Field(
        default=None,
        description="of the classes: varifocal, matchability-aware (DEIM), cross-entropy (DETR); "
        "null: ce for a model with a logit for no object, else vfl",
    )
    vfl: float = Field(default=1.0, ge=0)
    mal: float = Field(default=1.0, ge=0)
    ce: float = Field(default=1.0, ge=0)
    no_object: float = Field(default=0.1, gt=0, le=1, description="of queries without a target, in the cross-entropy")
    box: float = Field(default=5.0, ge=0)
    giou: float = Field(default=2.0, ge=0)
    match_class: float | None = Field(default=None, ge=0, description="1 with ce and 2 else where not given")
    match_box: float = Field(default=5.0, ge=0)
    match_giou: float = Field(default=2.0, ge=0)
    match_quality_from: float | None = Field(
        default=None, ge=0, le=1, description="share of the epochs after which score times IoU decides alone (DEIM)"
    )
    fgl: float = Field(default=0.15, ge=0, description="fine-grained localisation (D-FINE)")
    ddf: float = Field(default=1.5, ge=0, description="distillation between layers (D-FINE)")
    union: bool = Field(default=False, description="boxes learn from the matches of all layers together (D-FINE)")
    one_to_many: int = Field(default=8, ge=1, description="queries a target, for dense supervision")
    dense: float = Field(default=1.0, ge=0, description="weight of dense supervision")


class ClassificationLossSection(Section):
    """The loss of the classes, and a teacher's."""

    kind: Literal["softmax", "sigmoid"] = Field(default="softmax", description="cross-entropy, softmax or per class")
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    teacher: str | None = Field(default=None, description="a classifier to learn from: anything load_model takes")
    distillation: float = Field(default=0.5, ge=0, le=1, description="weight of the teacher's classes")


class TrainSection(Section):
    """The run."""

    epochs: int = Field(ge=1)
    batch: int = Field(ge=1, description="images per process and step")
    accumulate: int = Field(default=1, ge=1, description="batches whose gradients are averaged into one step")
    freeze: list[str] = Field(default_factory=list, description="parts to leave as they are; [backbone]: linear probe")
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    ema: float | None = Field(default=0.9999, gt=0, lt=1, description="largest decay; null for no average")
    ema_warmup: int = Field(default=2000, ge=0, description="steps, at most a tenth of the run")
    device: str = "auto"

    @field_validator("freeze", mode="before")
    @classmethod
    def one_or_many(cls, parts: Any) -> Any:
        """``train.freeze=backbone`` is a list of one."""
        return [parts] if isinstance(parts, str) else parts


class EvalSection(Section):
    """Evaluation during the run."""

    every: int = Field(default=1, ge=1, description="epochs")
    batch: int = Field(default=8, ge=1)
    backend: Literal["hotcoco", "pycocotools"] = "hotcoco"
    top_k: int = Field(default=300, ge=1, description="detections an image")


class ClassificationEvalSection(Section):
    """Evaluation during the run."""

    every: int = Field(default=1, ge=1, description="epochs")
    batch: int = Field(default=64, ge=1)


class Run(Section):
    """What every run has."""

    model: ModelSection
    optim: OptimSection = Field(default_factory=OptimSection)
    train: TrainSection
    output: str = Field(description="the run's folder")
    seed: int = Field(default=0, ge=0)


class RunConfig(Run):
    """A run that trains a detector."""

    task: Literal["detection"] = "detection"
    data: DetectionDataSection
    augment: AugmentSection = Field(default_factory=AugmentSection)
    loss: LossSection = Field(default_factory=LossSection)
    eval: EvalSection = Field(default_factory=EvalSection)

    @model_validator(mode="after")
    def of_one_size(self) -> RunConfig:
        """Blended and composed images must have one size."""
        if self.data.longest is not None and (self.augment.mosaic or self.augment.mixup):
            raise ValueError("with data.longest images differ in size: set augment.mosaic and augment.mixup to 0")
        return self


class ClassificationRunConfig(Run):
    """A run that trains a classifier."""

    task: Literal["classification"]
    data: ClassificationDataSection
    augment: ClassificationAugmentSection = Field(default_factory=ClassificationAugmentSection)
    loss: ClassificationLossSection = Field(default_factory=ClassificationLossSection)
    eval: ClassificationEvalSection = Field(default_factory=ClassificationEvalSection)


AnyRunConfig = RunConfig | ClassificationRunConfig
TASKS: dict[str, type[RunConfig] | type[ClassificationRunConfig]] = {
    "detection": RunConfig,
    "classification": ClassificationRunConfig,
}
