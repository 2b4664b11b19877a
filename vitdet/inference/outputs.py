"""What ``vitdet predict`` leaves behind: annotated pictures and one ``predictions.json``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from vitdet.errors import UserError
from vitdet.results import Classification, Detections
from vitdet.structures import ClassMap

SHEET = "sheet.jpg"  # where the pictures of a run may be shown side by side


class PredictionWriter:
    """Writes results into a folder, one by one.

    Each image becomes ``NAME.png`` if its file was one, else ``NAME.jpg``; more of one name become ``NAME_2.jpg`` …;
    images without a file ``image_1.jpg`` …. ``predictions.json`` is of detections a COCO result list (boxes xywh in
    pixels) whose rows also have ``file_name``, of classifications one ``{"file_name", "classes": [{"name", "label",
    "score"}, …]}`` an image; it appears with :meth:`close`. Files are replaced as a whole, never left half written.
    As a context manager the writer closes itself, or after an error leaves no ``predictions.json``.

    Args:
        out_dir: the folder; made where it does not exist. Files of an earlier run in it are replaced.
        class_map: gives the category ids, and the order of the summary.

    Raises:
        UserError: ``out_dir`` cannot be a folder.
    """

    def __init__(self, out_dir: str | Path, class_map: ClassMap) -> None:
        self.out_dir = Path(out_dir)
        self._made = not self.out_dir.exists()
        try:
            self.out_dir.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise UserError(
                f"the output folder {out_dir} cannot be made, because a file has that name; choose another"
            ) from error
        self._class_map = class_map
        self._taken = {SHEET}  # and no picture may have its name
        self._images = 0
        self._rows = 0
        self._counted = "objects"  # or "images", by their best class
        self._counts: Counter[int] = Counter()
        # Rows go to the file at once, so that a large folder never lies in memory.
        self._partial = self.out_dir / ".predictions.json.part"
        self._file = self._partial.open("w", encoding="utf-8")

    def write(self, result: Detections | Classification, image_id: int | None = None) -> Path:
        """Draw and record one image.

        Args:
            result: of the image.
            image_id: the COCO id of its detections in ``predictions.json``; the images are counted from 1 where it is
                not given.

        Returns:
            The picture's path.

        Raises:
            UserError: the source image lies in the output folder, where its picture could replace it.
        """
        source = result.path
        if source is not None and source.resolve().parent == self.out_dir.resolve():
            raise UserError(
                f"the output folder {self.out_dir} holds the image {source.name} itself; choose another, "
                "so that no picture replaces an image"
            )
        self._images += 1
        picture = self.out_dir / self._free_name(source)
        partial = self.out_dir / f".part{picture.suffix}"
        result.save(partial)
        partial.replace(picture)
        name = picture.name if source is None else source.as_posix()
        if isinstance(result, Classification):
            self._counted = "images"
            self._counts.update(result.labels[:1].tolist())
            self._write_row({"file_name": name, "classes": list(result)})
        else:
            self._counts.update(result.labels.tolist())
            for row in result.to_coco(self._images if image_id is None else image_id, self._class_map):
                self._write_row({**row, "file_name": name})
        return picture

    def close(self) -> dict[str, Any]:
        """Finish ``predictions.json``.

        Returns:
            ``images`` and, of detections, ``objects`` (how many); ``per_class``: name -> objects, or of
            classifications images whose best class it is, in the class map's order, only classes that were found.
        """
        if not self._file.closed:
            self._file.write("\n]\n" if self._rows else "[]\n")
            self._file.close()
            self._partial.replace(self.out_dir / "predictions.json")
        found: Counter[str] = Counter()  # a name may belong to several classes
        for label, count in sorted(self._counts.items()):
            found[self._class_map.names[label]] += count
        objects = {"objects": sum(self._counts.values())} if self._counted == "objects" else {}
        return {"images": self._images, **objects, "per_class": dict(found)}

    def __enter__(self) -> PredictionWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif not self._file.closed:
            self._file.close()
            for name in (self._partial.name, ".part.jpg", ".part.png"):
                (self.out_dir / name).unlink(missing_ok=True)
            if self._made and not any(self.out_dir.iterdir()):
                self.out_dir.rmdir()

    def _write_row(self, row: dict[str, Any]) -> None:
        self._file.write(",\n" if self._rows else "[\n")
        self._file.write(json.dumps(row, allow_nan=False))
        self._rows += 1

    def _free_name(self, source: Path | None) -> str:
        """A name no picture of this run has; compared without case, which some file systems ignore."""
        stem = f"image_{self._images}" if source is None else source.stem
        suffix = ".png" if source is not None and source.suffix.lower() == ".png" else ".jpg"
        name, number = stem + suffix, 1
        while name.casefold() in self._taken:
            number += 1
            name = f"{stem}_{number}{suffix}"
        self._taken.add(name.casefold())
        return name


def format_table(summary: Mapping[str, Any]) -> str:
    """The summary that :meth:`PredictionWriter.close` returns, a line a class, the most frequent first."""
    per_class = sorted(summary["per_class"].items(), key=lambda item: -item[1])
    total = f"all ({summary['images']} {'image' if summary['images'] == 1 else 'images'})"
    width = max(len(name) for name in ("class", total, *summary["per_class"]))
    counted = "objects" if "objects" in summary else "images"
    rows = [("class", counted), *per_class, (total, summary[counted])]
    return "\n".join(f" {name:<{width}} {count:>8}" for name, count in rows)
