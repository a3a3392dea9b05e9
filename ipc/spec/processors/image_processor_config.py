"""ImageProcessorConfig: how images for a model are resized, cropped and cut into tiles before they are encoded.

The settings are those of transformers' image processors without torchvision; with torchvision installed, transformers
resizes with other code, whose pixels differ slightly. Rescaling and normalization are the workers' part.

`detail` of a request: `low` makes one small image of it if the family can (Qwen and Pixtral: at most 512 × 512 pixels;
Idefics3: the whole image without tiles; InternVL: one tile) and changes nothing otherwise; `high` and `auto` are the
model's settings.

Settings come from the checkpoint: from processor_config.json, where newer ones nest them, or from
preprocessor_config.json. A setting that a file leaves out, or sets to null, has its class's default.
`--mm-processor-kwargs` overrides settings by transformers' names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec

from ...errors import ConfigError
from ..models.config_file import MAX_SIZE, shown
from ..models.vision_config import Grid, VisionConfig, VisionFamily
from .image_sizes import MAX_SPLIT_SIDE, Size, max_smart_factors, patched_size, tiled_size
from .processor_classes import BICUBIC, CLASSES, CLASSES_BY_FAMILY, OLD_NAMES, AnySize, ProcessorClass, Settings
from .processor_file import read_object, read_processor

Detail: TypeAlias = Literal["low", "high", "auto"]

QWEN: tuple[VisionFamily, ...] = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
MAX_PIXELS_A_SIDE = 1 << 16
LOW_SIDE = 512  # pixels of an image of low detail, where the family takes any size


class ImageSize(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The size to resize to, in one of transformers' forms; 0: not given."""

    height: int = 0
    width: int = 0
    shortest_edge: int = 0
    longest_edge: int = 0
    max_height: int = 0
    max_width: int = 0


class ImageProcessorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a model's image processor. Equal image bytes and equal digests of settings give equal media files.

    Grids of media files: Qwen (1, rows, columns) of patches; LLaVA, Gemma 3 and Pixtral the same; Idefics3 and InternVL
    (tiles in the file, rows, columns), where rows and columns count tiles without the whole image, which follows them:
    (1, 0, 0) is a whole image alone for Idefics3, and (1, 1, 1) for InternVL.
    """

    kind: ClassVar[Literal["image"]] = "image"

    family: VisionFamily
    do_resize: bool
    size: ImageSize
    resample: int  # Pillow's filter
    crop: tuple[int, int] | None  # height and width to cut from the middle
    square_color: tuple[int, int, int] | None  # of borders that make an image square before a resize; None: none
    patch_size: int
    merge_size: int
    num_class_embeds: int  # LLaVA: embeddings besides those of patches; -1: the first patch is dropped
    tile_size: int  # Idefics3: side of a tile in pixels
    is_tiled: bool  # Idefics3 and InternVL
    min_tiles: int  # InternVL
    max_tiles: int

    @property
    def factor(self) -> int:
        """Pixels on each side of one embedding."""
        return self.patch_size * self.merge_size

    @property
    def tile(self) -> Size | None:
        """Size of each tile; None if it depends on the image."""
        if self.family == "idefics3":
            return Size(self.tile_size, self.tile_size)
        if self.family in QWEN or self.family == "pixtral":
            return None
        if self.crop is not None:
            return Size(*self.crop)
        if self.do_resize and self.size.height and self.size.width:
            return Size(self.size.height, self.size.width)
        return None

    def num_embeds(self, grid: Grid) -> int:
        """Return the number of embeddings of an image, which is also the number of its placeholders."""
        if self.family in ("idefics3", "internvl"):
            tile = self.tile
            assert tile is not None
            return grid[0] * self._embeds_of(tile.height // self.patch_size, tile.width // self.patch_size)
        return grid[0] * self._embeds_of(grid[1], grid[2]) + self.num_class_embeds

    @property
    def max_embeds(self) -> int:
        """Upper bound of the number of embeddings of one image."""
        if self.family in QWEN:
            return max_smart_factors(self.factor, self.size.shortest_edge, self.size.longest_edge)
        if self.family == "pixtral":
            height, width = patched_size(self.max_size, self.max_size, self.factor)
            return (height // self.factor) * (width // self.factor)
        tile = self.tile
        assert tile is not None
        if self.family in ("idefics3", "internvl"):
            return self.num_embeds((self._max_tiles(), 0, 0))
        return self.num_embeds((1, tile.height // self.patch_size, tile.width // self.patch_size))

    @property
    def max_size(self) -> Size:
        """Largest size of Pixtral's images before they are rounded up to patches."""
        size = self.size
        return Size(size.longest_edge, size.longest_edge) if size.longest_edge else Size(size.height, size.width)

    def with_detail(self, detail: Detail) -> ImageProcessorConfig:
        """Return the settings for a request's `detail`; see the head of this file."""
        size = self.size
        if detail != "low":
            return self
        if self.family in QWEN:
            limit = max(LOW_SIDE**2, self.factor**2)
            low = ImageSize(shortest_edge=min(size.shortest_edge, limit), longest_edge=min(size.longest_edge, limit))
            return msgspec.structs.replace(self, size=low)
        if self.family == "pixtral":
            low = ImageSize(height=min(self.max_size.height, LOW_SIDE), width=min(self.max_size.width, LOW_SIDE))
            return msgspec.structs.replace(self, size=low)
        return msgspec.structs.replace(self, is_tiled=False)

    def digest(self) -> bytes:
        """Return the SHA-256 of these settings."""
        return hashlib.sha256(b"tokenloom-image-1" + msgspec.json.encode(self, order="deterministic")).digest()

    def _embeds_of(self, rows: int, columns: int) -> int:
        return (rows // self.merge_size) * (columns // self.merge_size)

    def _max_tiles(self) -> int:
        if not self.is_tiled:
            return 1
        if self.family == "internvl":
            return self.max_tiles + 1 if self.max_tiles > 1 else 1
        longest = self.size.longest_edge
        longest = min(longest + longest % 2, MAX_SPLIT_SIDE)  # the shorter side is made even
        size = Size(longest, longest) if longest else Size(self.size.height, self.size.width)
        height, width = tiled_size(size, self.tile_size)
        num_tiles = (height // self.tile_size) * (width // self.tile_size)
        return num_tiles + 1 if num_tiles > 1 else 1


def load_image_processor(
    folder: Path, vision: VisionConfig, overrides: Mapping[str, Any] | None = None
) -> ImageProcessorConfig:
    """Read the image processor of a checkpoint. ConfigError if it is not served, does not match the encoder, or
    `overrides` has unknown or invalid settings."""
    given = read_processor(folder, "image_processor")
    name = _class_name(given, vision.family, folder)
    kind = CLASSES[name]
    unknown = sorted(set(overrides or ()) - set(kind.overridable))
    if unknown:
        known = ", ".join(sorted(kind.overridable))
        raise ConfigError(f"--mm-processor-kwargs: {', '.join(unknown)} is no setting of {name}; known are {known}")
    settings = _settings(kind.defaults, {}, "the defaults")
    settings = _settings(msgspec.structs.asdict(settings), given, f"the image processor of {folder}")
    if vision.family == "internvl":
        settings.crop_to_patches = True  # by transformers' processor, whatever the file says
    size = _size(settings, kind, {})
    settings = _settings(msgspec.structs.asdict(settings), dict(overrides or {}), "--mm-processor-kwargs")
    if overrides:
        size = _size(settings, kind, overrides, size)
    if settings.do_center_crop and vision.family == "pixtral":
        raise ConfigError(f"{name}: do_center_crop is not served for this family: set it to false")
    config = _config(settings, size, vision, _num_class_embeds(folder, vision), kind)
    _check(config, vision, name)
    return config


def _class_name(given: Mapping[str, Any], family: VisionFamily, folder: Path) -> str:
    name = given.get("image_processor_type") or given.get("feature_extractor_type")
    known = CLASSES_BY_FAMILY[family]
    if not isinstance(name, str):
        return known[0]
    name = name.replace("FeatureExtractor", "ImageProcessor").removesuffix("Fast").removesuffix("Pil")
    name = OLD_NAMES.get(name, name)
    if name not in known:
        raise ConfigError(
            f"{folder} has the image_processor_type {name:.100}; of {family} models are served {', '.join(known)}"
        )
    return name


def _settings(base: Mapping[str, Any], given: Mapping[str, Any], where: str) -> Settings:
    """Return `base` with the values of `given` that are not null. ConfigError, about `where`, if one is invalid."""
    try:
        return msgspec.convert(dict(base) | {key: each for key, each in given.items() if each is not None}, Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from None


def _size(
    settings: Settings, kind: ProcessorClass, given: Mapping[str, Any], before: ImageSize | None = None
) -> ImageSize:
    """Return the size to resize to: settings.size if `given` names a size or `before` is None, else `before`. Families
    with min_pixels and max_pixels take these as edges, by the same rule. `given`: the overrides, if `before` is set."""
    size = _image_size(settings.size, kind.is_square) if before is None or "size" in given else before
    if "min_pixels" not in kind.overridable:
        return size
    if before is not None and "size" in given:  # one bound may be given alone
        size = ImageSize(
            shortest_edge=size.shortest_edge or before.shortest_edge,
            longest_edge=size.longest_edge or before.longest_edge,
        )
    names = ("min_pixels", "max_pixels")
    lower, upper = (getattr(settings, name) if before is None or name in given else None for name in names)
    return ImageSize(
        shortest_edge=size.shortest_edge if lower is None else lower,
        longest_edge=size.longest_edge if upper is None else upper,
    )


def _image_size(size: AnySize | None, is_square: bool, name: str = "size") -> ImageSize:
    match size:
        case int():
            given = {"height": size, "width": size} if is_square else {"shortest_edge": size}
        case [height, width]:
            given = {"height": height, "width": width}
        case dict():
            names = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
            given = {names.get(key, key): value for key, value in size.items() if value is not None}
        case _:
            given = {}
    try:
        result = msgspec.convert(given, ImageSize)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the image processor's {name} {shown(size)} cannot be read: {error}") from None
    if not given or result == ImageSize() or min(given.values()) < 1:
        raise ConfigError(
            f"the image processor's {name} is {shown(size)}: give height and width, or edges, of at least 1 pixel"
        )
    return result


def _config(
    settings: Settings, size: ImageSize, vision: VisionConfig, num_class_embeds: int, kind: ProcessorClass
) -> ImageProcessorConfig:
    has_crop = settings.do_center_crop and "crop_size" in kind.overridable
    crop = _image_size(settings.crop_size, True, "crop_size") if has_crop else None
    color = None
    if settings.do_pad and "do_pad" in kind.overridable:
        mean = settings.image_mean if isinstance(settings.image_mean, list) else [settings.image_mean or 0.0] * 3
        color = (int(mean[0] * 255), int(mean[1] * 255), int(mean[2] * 255))
    elif settings.do_pad and settings.pad_size is not None:
        raise ConfigError(f"the image processor pads to {settings.pad_size}, which is not served: set do_pad to false")
    return ImageProcessorConfig(
        family=vision.family,
        do_resize=settings.do_resize is not False,
        size=size,
        resample=BICUBIC if settings.resample is None else settings.resample,
        crop=None if crop is None else (crop.height, crop.width),
        square_color=color,
        patch_size=vision.patch_size,
        merge_size=vision.merge_size,
        num_class_embeds=num_class_embeds,
        tile_size=(settings.max_image_size or {}).get("longest_edge") or 0,
        is_tiled=bool(settings.do_image_splitting or settings.crop_to_patches),
        min_tiles=settings.min_patches or 1,
        max_tiles=settings.max_patches or 1,
    )


def _num_class_embeds(folder: Path, vision: VisionConfig) -> int:
    """Return by how many LLaVA's embeddings exceed its patches: CLIP's towers add one, and the strategy `default` drops
    the first."""
    if vision.family != "llava":
        return 0
    config = read_object(folder / "config.json")
    tower = config.get("vision_config") or {}
    has_class = tower.get("model_type", "clip_vision_model") == "clip_vision_model"
    drops_first = config.get("vision_feature_select_strategy", "default") == "default"
    return int(has_class) - int(drops_first)


def _check(config: ImageProcessorConfig, vision: VisionConfig, name: str) -> None:
    """Raise ConfigError if `resample` is invalid, or the size of processed images is invalid, unbounded, or not the
    encoder's."""
    size = config.size
    if max(msgspec.structs.astuple(size)) > MAX_SIZE:
        raise ConfigError(f"{name}: size, or min_pixels and max_pixels, exceed {MAX_SIZE}: {size}")
    if not 0 <= config.resample <= 5:
        raise ConfigError(f"{name}: resample is {config.resample}; Pillow's filters are 0 to 5")
    if not config.do_resize and config.crop is None:
        raise ConfigError(f"{name}: do_resize is false, so that images may have any size: set it to true")
    if config.family in QWEN and not 0 < size.shortest_edge <= size.longest_edge:
        bounds = f"min_pixels {size.shortest_edge} and max_pixels {size.longest_edge}"
        raise ConfigError(f"{name}: {bounds} must be positive and ascending (the edges of size, in older files)")
    if config.family in ("pixtral", "idefics3") and not (size.longest_edge or (size.height and size.width)):
        raise ConfigError(f"{name}: size needs longest_edge, or height and width")
    if config.family == "idefics3" and not config.tile_size:
        raise ConfigError(f"{name}: max_image_size needs longest_edge")
    if config.family in ("internvl", "gemma3") and not (size.height and size.width):
        raise ConfigError(f"{name}: size needs height and width")
    if max(msgspec.structs.astuple(size)) > MAX_PIXELS_A_SIDE and config.family not in QWEN:
        raise ConfigError(f"{name}: size {size} exceeds {MAX_PIXELS_A_SIDE} pixels: give a smaller one")
    tile = config.tile
    if tile is None and config.family == "llava":
        raise ConfigError(
            f"{name}: images would have different sizes: give size as height and width, or do_center_crop"
        )
    if tile is not None and vision.image_size and tile != (vision.image_size, vision.image_size):
        encoder = f"{vision.image_size} × {vision.image_size}"
        raise ConfigError(
            f"{name} makes images of {tile} pixels, but the encoder takes {encoder}: give these as size, crop_size or "
            "max_image_size"
        )
