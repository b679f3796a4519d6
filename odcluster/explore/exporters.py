"""The clusters of a run, as people corrected them, in the formats of other programs.

Each exporter takes a `Job` and returns sentences for people. What it writes appears whole or not at all, and only at
`job.out`. Images that people left out, and those without a cluster, are in the tables (cluster -1) and nowhere else.

- csv, parquet: a row per image. Parquet has the feature too, and its first two principal components: Embedding Atlas
  (`embedding-atlas FILE --vector vector`, or `--x projection_x --y projection_y`) and data frames read it.
- folders: see folders.py.
- projector: vectors.tsv, metadata.tsv, sprite.png and projector_config.pbtxt, for `tensorboard --logdir OUT`.
- coco: labels.json, each image in one box that covers it, categories = clusters.
- fiftyone: labels.json and data.json (where the images are), a `FiftyOneImageClassificationDataset`.

JSON keeps names that are not UTF-8 as lone surrogates, which Python turns back into the very bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from odcluster.data.images import image_size
from odcluster.data.readers import shown
from odcluster.data.sources import FileSource
from odcluster.errors import DataError, ImageRefused
from odcluster.explore.atlas import plane, spread
from odcluster.explore.collection import Collection, View
from odcluster.explore.export import rank_within_cluster
from odcluster.explore.folders import (
    Mode,
    Progress,
    file_name,
    folder_names,
    in_threads,
    new_folder,
    place_images,
    unique_titles,
)
from odcluster.explore.mosaic import square_thumbnail
from odcluster.explore.tables import BLOCK, Kind, decodable, open_table

MOST_POINTS = 10_000
"""Of the projector: a browser draws them and computes t-SNE of them."""
SPRITE = 8192
"""Largest side of a picture that browsers take as a texture."""

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Job:
    """One export."""

    collection: Collection
    out: Path
    mode: Mode
    progress: Progress
    replace: bool = False
    """Whether what is at `out` may be replaced, as at the place that is ours."""

    def view(self) -> View:
        view = self.collection.view()
        if not bool((view.clusters.labels >= 0).any()):
            reason = "; ".join(self.collection.notes) or "it is still in its warm start"
            raise DataError(f"{self.collection.run.path} has no clusters yet: {reason}")
        return view


def clustered(view: View) -> Ids:
    """The images that have a cluster."""
    return np.flatnonzero(view.clusters.labels >= 0)


def present(view: View) -> list[int]:
    """The clusters that have images."""
    return np.unique(view.clusters.labels[view.clusters.labels >= 0]).tolist()


def left_out(refused: list[tuple[int, str]], paths: list[str]) -> list[str]:
    if not refused:
        return []
    image, why = refused[0]
    return [f"{len(refused):,} images could not be read and are missing (the first, {shown(paths[image])}: {why})"]


# --- Tables -----------------------------------------------------------------------------------------


def export_table(job: Job) -> list[str]:
    """csv and parquet, by the ending of `out`."""
    view, paths = job.view(), job.collection.manifest.paths
    labels = view.clusters.labels
    similarities = np.where(labels >= 0, view.clusters.similarities, np.nan)
    ranks = rank_within_cluster(labels, similarities)
    kinds: dict[str, Kind] = {"path": "text", "cluster": "int", "name": "text", "similarity": "float", "rank": "int"}
    rows = view.snapshot.rows if job.out.suffix.lower() == ".parquet" else None
    points = None
    if job.out.suffix.lower() == ".parquet":
        kinds = {"id": "int", **kinds}
    if rows is not None:
        kinds["vector"] = "vector"
        usable = np.flatnonzero(rows.scale > 0)
        points = plane(rows.unit(usable[:: spread(len(usable))]))
    if points is not None:
        kinds |= {"projection_x": "float", "projection_y": "float"}
    with open_table(job.out, kinds) as table:
        for start in range(0, len(paths), BLOCK):
            here = slice(start, start + BLOCK)
            columns: dict[str, Any] = {
                "id": np.arange(start, start + len(paths[here])),
                "path": paths[here],
                "cluster": labels[here],
                "name": [view.name(cluster) for cluster in labels[here].tolist()],
                "similarity": similarities[here],
                "rank": [rank or None for rank in ranks[here].tolist()],
            }
            if rows is not None:
                columns["vector"] = rows.unit(here)
            if points is not None:
                columns["projection_x"], columns["projection_y"] = points(columns["vector"]).T
            table.write(**{name: columns[name] for name in kinds})
            job.progress("rows", min(start + BLOCK, len(paths)), len(paths))
    return [f"{len(clustered(view)):,} images in {len(present(view)):,} clusters: {job.out}"]


# --- Folders ----------------------------------------------------------------------------------------


def export_folders(job: Job) -> list[str]:
    """A folder of images per cluster."""
    view, source = job.view(), job.collection.source
    names = folder_names(present(view), view.name)
    labels, images = view.clusters.labels, clustered(view)
    with new_folder(job.out, replace=job.replace) as folder:
        taken: dict[int, set[str]] = {cluster: set() for cluster in names}
        for cluster in names:
            (folder / names[cluster]).mkdir()
        places = {}
        for image in images.tolist():
            cluster, is_file = int(labels[image]), isinstance(source, FileSource)
            name = file_name(source.manifest, image, taken[cluster], is_file=is_file)
            places[image] = folder / names[cluster] / name
        refused = place_images(source, places, job.mode, job.progress)
        check_some(refused, images, source.manifest.paths)
    said = [f"{len(images) - len(refused):,} images in {len(names):,} folders: {job.out}"]
    if without := len(labels) - len(images):
        said.append(f"{without:,} images without a cluster, or left out by people, are not there")
    return said + left_out(refused, source.manifest.paths)


def check_some(refused: list[tuple[int, str]], images: Ids, paths: list[str]) -> None:
    if len(refused) == len(images):
        image, why = refused[0]
        raise DataError(f"none of the images can be read (the first, {shown(paths[image])}: {why}); are they moved?")


# --- TensorBoard ------------------------------------------------------------------------------------


def export_projector(job: Job) -> list[str]:
    """What TensorBoard's projector reads, of up to 10,000 images spread evenly over all."""
    view, source = job.view(), job.collection.source
    rows = view.snapshot.rows
    if rows is None:
        raise DataError(f"there are no features to project: {'; '.join(job.collection.notes)}")
    images = clustered(view)
    images = images[rows.scale[images] > 0]
    chosen = images[np.unique(np.linspace(0, len(images) - 1, min(len(images), MOST_POINTS)).astype(np.int64))]
    side = int(np.ceil(np.sqrt(len(chosen))))
    tile = max(8, min(64, SPRITE // side))
    sprite = Image.new("RGB", (side * tile, side * tile), (127, 127, 127))

    def draw(image: int) -> Image.Image:
        return square_thumbnail(source.image(image, tile), tile)

    refused = []
    with new_folder(job.out, replace=job.replace) as folder:
        for at, (image, picture) in enumerate(in_threads(draw, chosen.tolist(), "pictures", job.progress)):
            if isinstance(picture, ImageRefused):
                refused.append((image, str(picture)))
            else:
                sprite.paste(picture, (at % side * tile, at // side * tile))
        sprite.save(folder / "sprite.png")
        with (folder / "vectors.tsv").open("w") as file:
            for start in range(0, len(chosen), 256):
                np.savetxt(file, rows.unit(chosen[start : start + 256]), fmt="%.6g", delimiter="\t")
        with (folder / "metadata.tsv").open("w", encoding="utf-8") as file:
            file.write("path\tcluster\tname\n")
            for image in chosen.tolist():
                cluster = int(view.clusters.labels[image])
                path = shown(decodable(source.manifest.paths[image]))  # no tab, no line break
                file.write(f"{path}\t{cluster}\t{view.name(cluster) or f'cluster {cluster}'}\n")
        (folder / "projector_config.pbtxt").write_text(PROJECTOR.format(tile=tile))
    said = [f"`tensorboard --logdir {job.out}` shows {len(chosen):,} of {len(images):,} images under Projector"]
    if refused:
        said.append(f"{len(refused):,} of them could not be read and have a grey picture")
    return said


PROJECTOR = """\
embeddings {{
  tensor_name: "features"
  tensor_path: "vectors.tsv"
  metadata_path: "metadata.tsv"
  sprite {{
    image_path: "sprite.png"
    single_image_dim: {tile}
    single_image_dim: {tile}
  }}
}}
"""


# --- JSON -------------------------------------------------------------------------------------------


def export_coco(job: Job) -> list[str]:
    """COCO's JSON: sizes are read from the images; a box covers each."""
    view, source = job.view(), job.collection.source
    titles = unique_titles(present(view), view.name, "cluster {}")
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    refused: list[tuple[int, str]] = []

    def size(image: int) -> tuple[int, int]:
        stored = source.stored(image)
        return image_size(stored) if isinstance(stored, bytes) else stored.shape[:2]

    with new_folder(job.out, replace=job.replace) as folder:
        chosen = clustered(view)
        written = images_beside(job, folder, chosen.tolist(), refused)
        for image, found in in_threads(size, sorted(written), "sizes of images", job.progress):
            if isinstance(found, ImageRefused):
                refused.append((image, str(found)))
                continue
            height, width = found
            images.append({"id": image, "file_name": written[image], "width": width, "height": height})
            annotations.append(
                {
                    "id": len(annotations) + 1,  # tools take 0 for none
                    "image_id": image,
                    "category_id": int(view.clusters.labels[image]) + 1,
                    "bbox": [0, 0, width, height],
                    "area": width * height,
                    "segmentation": [],
                    "iscrowd": 0,
                }
            )
        check_some(refused, chosen, source.manifest.paths)
        categories = [
            {"id": cluster + 1, "name": title, "supercategory": "cluster", "cluster": cluster}
            for cluster, title in titles.items()
        ]
        content = {
            "info": {"description": f"clusters of {job.collection.run.path.name}", "version": "1.0"},
            "licenses": [],
            "images": images,
            "annotations": annotations,
            "categories": categories,
        }
        (folder / "labels.json").write_text(json.dumps(content))
    where = "data/ beside it" if not isinstance(source, FileSource) else shown(source.manifest.root)
    said = f"{len(images):,} images in {len(categories):,} categories: {job.out / 'labels.json'} (images in {where})"
    return [said, *left_out(refused, source.manifest.paths)]


def export_fiftyone(job: Job) -> list[str]:
    """FiftyOne's classification format: classes and labels by key, and where the image of each key is."""
    view, source = job.view(), job.collection.source
    titles = unique_titles(present(view), view.name, "cluster {}")
    place = {cluster: at for at, cluster in enumerate(titles)}
    refused: list[tuple[int, str]] = []
    with new_folder(job.out, replace=job.replace) as folder:
        chosen = clustered(view).tolist()
        written = images_beside(job, folder, chosen, refused)
        labels = {f"{image:08d}": place[int(view.clusters.labels[image])] for image in written}
        (folder / "labels.json").write_text(json.dumps({"classes": list(titles.values()), "labels": labels}))
        if isinstance(source, FileSource):
            root = os.path.abspath(source.manifest.root)
            manifest = {f"{image:08d}": os.path.join(root, path) for image, path in written.items()}
            (folder / "data.json").write_text(json.dumps(manifest))
    kind = "fiftyone.types.FiftyOneImageClassificationDataset"
    said = f'fiftyone.Dataset.from_dir(dataset_dir="{job.out}", dataset_type={kind}) reads {len(labels):,} images'
    return [said, *left_out(refused, source.manifest.paths)]


def images_beside(job: Job, folder: Path, images: list[int], refused: list[tuple[int, str]]) -> dict[int, str]:
    """Names of the images: those of the manifest, or of PNG files in data/ where there are no files yet."""
    source = job.collection.source
    if isinstance(source, FileSource):
        return {image: source.manifest.paths[image] for image in images}
    (folder / "data").mkdir()
    places = {image: folder / "data" / f"{image:08d}.png" for image in images}
    refused += place_images(source, places, "copy", job.progress)
    check_some(refused, np.array(images), source.manifest.paths)
    missing = {image for image, _ in refused}
    return {image: path.name for image, path in places.items() if image not in missing}


EXPORTERS: dict[str, Callable[[Job], list[str]]] = {
    "csv": export_table,
    "parquet": export_table,
    "folders": export_folders,
    "projector": export_projector,
    "coco": export_coco,
    "fiftyone": export_fiftyone,
}
NEED_FEATURES = ("parquet", "projector")
"""The others are written without looking at an image's feature."""
