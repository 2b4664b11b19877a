"""The command line: argument parsing and printing only.

Results go to stdout, everything else to stderr. A user's mistake ends with exit code 2 and one sentence; ``--debug``
anywhere shows the traceback instead.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from vitdet.errors import UserError

app = typer.Typer(
    help="Vision Transformers and the DETR family of detectors: train them, run them, measure them.",
    no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False,
)  # fmt: skip
data_app = typer.Typer(help="Make and look at data sets.", no_args_is_help=True)
app.add_typer(data_app, name="data")
benchmark_app = typer.Typer(help="Measure against other libraries, in turns on this machine.", no_args_is_help=True)
app.add_typer(benchmark_app, name="benchmark")

JsonPath = Annotated[str | None, typer.Option("--json", metavar="PATH", help="write the figures as JSON; - is stdout")]
ModelName = Annotated[str | None, typer.Option(metavar="NAME", help="of vitdet models, where the file does not say")]
SOURCE = (
    "a .safetensors of ours, NAME:TAG of vitdet models, a Hub id or folder in its layout, a publisher's file or address"
)
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps")]


@app.command()
def train(
    config: Annotated[str | None, typer.Argument(help="a YAML file, or the name of a shipped one")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    resume: Annotated[str | None, typer.Option(metavar="RUN", help="continue this run's folder")] = None,
    overwrite: Annotated[bool, typer.Option(help="replace a run in the output folder")] = False,
    json_path: JsonPath = None,
) -> None:
    """Train a detector or a classifier: vitdet train CONFIG data.root=DIR train.epochs=50."""
    from vitdet.build import resume_training, run_training
    from vitdet.config import load_config

    if resume is not None:
        if config or overrides or overwrite:
            raise UserError(
                "--resume takes no configuration, no overrides and no --overwrite: the run goes on as it was started"
            )
        folder = Path(resume) if Path(resume).is_dir() else Path(resume).parent
        metrics = resume_training(resume)
    elif config is None:
        raise UserError("vitdet train needs a configuration, or --resume RUN without one")
    else:
        settings = load_config(config, overrides)
        folder, metrics = Path(settings.output), run_training(settings, overwrite=overwrite)
    if not metrics:  # one of several processes; the main one tells
        return
    show_metrics(metrics, json_path)
    print(f"weights: {folder / 'best.safetensors'}\ncurves: {folder / 'curves.png'}", file=sys.stderr)


@app.command("eval")
def evaluate(
    source: Annotated[str, typer.Argument(help=SOURCE)],
    data: Annotated[str, typer.Option(metavar="DIR", help="the data set")],
    split: Annotated[str, typer.Option(help="of the data set")] = "val",
    batch: Annotated[int, typer.Option(min=1)] = 8,
    workers: Annotated[int, typer.Option(min=0)] = 2,
    device: Device = "auto",
    model: ModelName = None,
    backend: Annotated[str, typer.Option(help="hotcoco, or pycocotools: the same numbers, later")] = "hotcoco",
    save: Annotated[
        str | None, typer.Option(metavar="PATH", help="write what was found, image by image, as JSON")
    ] = None,
    confusion: Annotated[str | None, typer.Option(metavar="PNG", help="draw a classifier's confusion matrix")] = None,
    json_path: JsonPath = None,
) -> None:
    """Measure a model on a data set: COCO AP of a detector, top-1 and top-5 of a classifier."""
    from vitdet.build import evaluate_source
    from vitdet.engine.checkpoint import write_atomically
    from vitdet.evaluation.classification import save_confusion
    from vitdet.zoo import describe_source, is_classifier

    if confusion and not is_classifier(describe_source(source, model=model).name):
        raise UserError(f"{source} is a detector and has no confusion matrix; leave out --confusion")
    metrics = evaluate_source(
        source, root=data, split=split, batch=batch, workers=workers, device=device, backend=backend, model=model
    )
    results = metrics.pop("results")
    if save:
        write_atomically(Path(save), lambda temporary: temporary.write_text(json.dumps(results)))
    if confusion:
        write_atomically(Path(confusion), lambda temporary: save_confusion(metrics, temporary))
        print(f"confusion matrix: {confusion}", file=sys.stderr)
    show_metrics(metrics, json_path)


@app.command()
def predict(
    source: Annotated[str, typer.Argument(help=SOURCE)],
    images: Annotated[list[str], typer.Argument(metavar="IMAGE|DIR|GLOB...")],
    out: Annotated[str, typer.Option(metavar="DIR", help="where pictures and predictions.json go")],
    threshold: Annotated[float, typer.Option(min=0, max=1, help="least score of a detection")] = 0.5,
    batch: Annotated[int, typer.Option(min=1)] = 8,
    device: Device = "auto",
    model: ModelName = None,
    attention: Annotated[bool, typer.Option("--attention", help="show where a ViT looked")] = False,
    attention_method: Annotated[
        str | None, typer.Option(metavar="METHOD", help="the same by rollout, over all layers, or last, the last one's")
    ] = None,
    sheet: Annotated[bool, typer.Option("--sheet", help="also put the first 24 pictures on one sheet.jpg")] = False,
    json_path: JsonPath = None,
) -> None:
    """Detect objects or classify images: annotated pictures, predictions.json and a table."""
    from vitdet.inference.outputs import SHEET, PredictionWriter, format_table
    from vitdet.inference.predictor import Predictor
    from vitdet.inference.visualize import save_sheet
    from vitdet.zoo import load_model

    predictor = Predictor(
        load_model(source, model=model),
        device=device,
        threshold=threshold,
        batch_size=batch,
        attention=attention_method or attention,
    )
    pictures: list[Path] = []
    with PredictionWriter(out, predictor.metadata.class_map) as writer:
        for result in predictor.stream(images):
            pictures.append(writer.write(result))
            print(f"{pictures[-1]}: {describe(result)}", file=sys.stderr)
        summary = writer.close()
    if sheet:
        print(save_sheet(pictures[:24], Path(out) / SHEET), file=sys.stderr)
    if json_path:
        write_json(summary, json_path)
    if json_path != "-":
        print(format_table(summary))


def describe(result: Any) -> str:
    """One image's result in a few words."""
    from vitdet.results import Classification

    return f"{result.name} {result.score:.2f}" if isinstance(result, Classification) else f"{len(result)} objects"


@app.command()
def models(
    pattern: Annotated[str, typer.Argument(help="of the shell's kind, such as 'rtdetr*'")] = "*",
    json_path: JsonPath = None,
) -> None:
    """List the models, their sizes (detectors of 80 classes, classifiers of 1000), and published weights."""
    from vitdet.zoo.published import describe_models, format_table

    described = describe_models(pattern)
    if json_path:
        write_json(described, json_path)
    if json_path != "-":
        print(format_table(described))


@app.command()
def info(source: Annotated[str, typer.Argument(help=SOURCE)], model: ModelName = None) -> None:
    """What a model says about itself, as JSON."""
    from vitdet.zoo import describe_source

    write_json(describe_source(source, model=model).to_dict(), "-")


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help=SOURCE)],
    destination: Annotated[str, typer.Argument(metavar="DEST", help="a file of ours, NAME.safetensors; or a folder")],
    model: ModelName = None,
    overwrite: Annotated[bool, typer.Option(help="replace what is there")] = False,
) -> None:
    """Write weights as a file of ours, or as a folder: a detector for transformers, a classifier for timm."""
    from vitdet import __version__
    from vitdet.zoo.convert import convert_source

    for note in convert_source(source, destination, model=model, overwrite=overwrite, version=__version__):
        print(note, file=sys.stderr)
    print(destination)


@data_app.command("make")
def make(
    kind: Annotated[str, typer.Argument(help="digits: scenes of real handwritten digits")],
    root: Annotated[str, typer.Argument(metavar="DIR")],
    train: Annotated[int, typer.Option(min=1, help="training scenes")] = 600,
    val: Annotated[int, typer.Option(min=1, help="validation scenes")] = 120,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Make a data set without a network: vitdet data make digits DIR."""
    from vitdet.data.digits import make_digits

    if kind != "digits":
        raise UserError(f"there is no offline data set {kind!r}; the one there is is called digits")
    print(make_digits(root, train=train, val=val, seed=seed))


@data_app.command("convert")
def convert_data(
    root: Annotated[str, typer.Argument(metavar="DIR", help="a data set for detection, of any format")],
    destination: Annotated[str, typer.Argument(metavar="DEST", help="an empty or new folder")],
    to: Annotated[str, typer.Option(help="coco, yolo, voc or csv (of Open Images' kind)")],
    split: Annotated[list[str] | None, typer.Option(help="of the data set; may be repeated, all by default")] = None,
) -> None:
    """Write a detection data set in another format: the same boxes, the images linked or copied."""
    from vitdet.data.convert import convert_set

    for line in convert_set(root, destination, to=to, splits=split or ()):
        print(line, file=sys.stderr)
    print(destination)


@benchmark_app.command("timm")
def benchmark_timm(
    data: Annotated[str, typer.Option(metavar="DIR", help="an image folder, such as Imagenette at 96 pixels")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    config: Annotated[
        str, typer.Option(help="of a run that trains a plain ViT")
    ] = "vit_tiny_patch16_224_imagenette.yaml",
    minutes: Annotated[float, typer.Option(min=0.01, help="of training, for each of the two")] = 30,
    timm_workers: Annotated[int, typer.Option(min=0, help="loader processes of timm; ours: data.workers")] = 2,
    json_path: JsonPath = None,
) -> None:
    """Train a ViT for the same minutes with this package and with timm's own parts: top-1 and images a second."""
    from vitdet.benchmark.training import compare_with_timm, format_table

    figures = compare_with_timm(config, root=data, minutes=minutes, timm_workers=timm_workers, overrides=overrides)
    if json_path:
        write_json(figures, json_path)
    if json_path != "-":
        print(format_table(figures))


def show_metrics(metrics: dict[str, Any], json_path: str | None) -> None:
    """The table of the task, and the figures as JSON where asked for."""
    from vitdet.evaluation import classification, coco

    if json_path:
        write_json(metrics, json_path)
    if json_path != "-":
        task: Any = classification if "top1" in metrics else coco
        print(task.format_table(metrics))
        print(task.format_class_table(metrics))


def write_json(values: Any, path: str) -> None:
    """As indented JSON to a file, or to stdout for ``-``."""
    # Rows of numbers on one line each: a confusion matrix of 1,000 classes is else a million lines.
    rows = re.compile(r"\[\n\s*([-+.\deE,\s]+?)\n\s*\]")
    text = rows.sub(lambda match: f"[{' '.join(match[1].split())}]", json.dumps(values, indent=2))
    if path == "-":
        print(text)
    else:
        from vitdet.engine.checkpoint import write_atomically

        write_atomically(Path(path), lambda temporary: temporary.write_text(text + "\n"))


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    try:
        return int(app(words, prog_name="vitdet", standalone_mode=False) or 0)
    except typer.Exit as stop:
        return stop.exit_code
    except (UserError, OSError, typer.TyperException) as error:
        if debug:
            raise
        text = error.format_message() if hasattr(error, "format_message") else str(error)
        if text:  # without any words typer has shown the help
            print(f"vitdet: {text}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, typer.Abort):
        print("vitdet: stopped", file=sys.stderr)
        return 130
