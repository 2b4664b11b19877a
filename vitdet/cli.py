"""The command line: argument parsing and printing only.

Results go to stdout, everything else to stderr. A user's mistake ends with exit code 2 and one sentence; ``--debug``
anywhere shows the traceback instead.
"""

from __future__ import annotations

import json
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

JsonPath = Annotated[str | None, typer.Option("--json", metavar="PATH", help="write the figures as JSON; - is stdout")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps")]


@app.command()
def train(
    config: Annotated[str | None, typer.Argument(help="a YAML file, or the name of a shipped one")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
    resume: Annotated[str | None, typer.Option(metavar="RUN", help="continue this run's folder")] = None,
    overwrite: Annotated[bool, typer.Option(help="replace a run in the output folder")] = False,
    json_path: JsonPath = None,
) -> None:
    """Train a detector: vitdet train CONFIG data.root=DIR train.epochs=50."""
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
    source: Annotated[str, typer.Argument(help="a .safetensors file")],
    data: Annotated[str, typer.Option(metavar="DIR", help="the data set")],
    split: Annotated[str, typer.Option(help="of the data set")] = "val",
    batch: Annotated[int, typer.Option(min=1)] = 8,
    workers: Annotated[int, typer.Option(min=0)] = 2,
    device: Device = "auto",
    backend: Annotated[str, typer.Option(help="hotcoco, or pycocotools: the same numbers, later")] = "hotcoco",
    save: Annotated[str | None, typer.Option(metavar="PATH", help="write the detections as COCO results")] = None,
    json_path: JsonPath = None,
) -> None:
    """Measure COCO AP of a model on a data set."""
    from vitdet.build import evaluate_source
    from vitdet.engine.checkpoint import write_atomically

    metrics = evaluate_source(
        source, root=data, split=split, batch=batch, workers=workers, device=device, backend=backend
    )
    results = metrics.pop("results")
    if save:
        write_atomically(Path(save), lambda temporary: temporary.write_text(json.dumps(results)))
    show_metrics(metrics, json_path)


@app.command()
def predict(
    source: Annotated[str, typer.Argument(help="a .safetensors file")],
    images: Annotated[list[str], typer.Argument(metavar="IMAGE|DIR|GLOB...")],
    out: Annotated[str, typer.Option(metavar="DIR", help="where pictures and predictions.json go")],
    threshold: Annotated[float, typer.Option(min=0, max=1, help="least score")] = 0.5,
    batch: Annotated[int, typer.Option(min=1)] = 8,
    device: Device = "auto",
    sheet: Annotated[bool, typer.Option("--sheet", help="also put the first 24 pictures on one sheet.jpg")] = False,
    json_path: JsonPath = None,
) -> None:
    """Detect objects: annotated pictures, predictions.json (COCO results) and a table."""
    from vitdet.inference.outputs import SHEET, PredictionWriter, format_table
    from vitdet.inference.predictor import Predictor
    from vitdet.inference.visualize import save_sheet

    predictor = Predictor(source, device=device, threshold=threshold, batch_size=batch)
    pictures: list[Path] = []
    with PredictionWriter(out, predictor.metadata.class_map) as writer:
        for detections in predictor.stream(images):
            pictures.append(writer.write(detections))
            print(f"{pictures[-1]}: {len(detections)} objects", file=sys.stderr)
        summary = writer.close()
    if sheet:
        print(save_sheet(pictures[:24], Path(out) / SHEET), file=sys.stderr)
    if json_path:
        write_json(summary, json_path)
    if json_path != "-":
        print(format_table(summary))


@app.command()
def models(pattern: Annotated[str, typer.Argument()] = "*", json_path: JsonPath = None) -> None:
    """List the models and their numbers of parameters (80 classes)."""
    import torch

    from vitdet.zoo import create_model, list_models

    with torch.device("meta"):
        sizes = {n: sum(p.numel() for p in create_model(n, num_classes=80).parameters()) for n in list_models(pattern)}
    if json_path:
        write_json(sizes, json_path)
    if json_path != "-":
        for name, size in sizes.items():
            print(f" {name:<20} {size / 1e6:>7.2f} M parameters")


@app.command()
def info(source: Annotated[str, typer.Argument(help="a .safetensors file")]) -> None:
    """What a weights file says about itself, as JSON."""
    from vitdet.engine.checkpoint import read_weights

    write_json(read_weights(Path(source))[0].to_dict(), "-")


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


def show_metrics(metrics: dict[str, Any], json_path: str | None) -> None:
    """The COCO table, and the figures as JSON where asked for."""
    from vitdet.evaluation.coco import format_class_table, format_table

    if json_path:
        write_json(metrics, json_path)
    if json_path != "-":
        print(format_table(metrics))
        print(format_class_table(metrics))


def write_json(values: Any, path: str) -> None:
    """As indented JSON to a file, or to stdout for ``-``."""
    text = json.dumps(values, indent=2)
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
