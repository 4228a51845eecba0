"""The recipe: everything that decides what a run does, in one typed object loaded from TOML.

A recipe is checked whole before anything starts, and dumped whole, defaults included, beside every result: loading
that dump gives an equal object. Secrets are never part of it. What is derived from a recipe (plans, sizes) lives
elsewhere.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import SplitResult, urlsplit

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from drawbar.errors import RecipeError
from drawbar.storage.urls import parse_url


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        strict=True,
        allow_inf_nan=False,
    )


def _has_port_or_none(parts: SplitResult) -> bool:
    try:
        return parts.port is None or parts.port > 0
    except ValueError:
        return False


def check_address(address: str) -> None:
    """Raises ValueError, which repeats no secret, where this is not `http://host`, with a port or without."""
    parts = urlsplit(address)
    if parts.username or parts.password:
        raise ValueError("credentials belong in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, not in an address")
    plain = address == f"{parts.scheme}://{parts.netloc}".rstrip("/") and _has_port_or_none(parts)
    if parts.scheme not in ("http", "https") or not parts.hostname or not plain:
        raise ValueError(f"{address!r} is no address: expected http://host:port")


class Data(Section):
    """What is read."""

    url: str = "s3://imagenet-like/train"
    """Where the shards lie: `s3://bucket/prefix`, `gs://…`, `az://container/prefix`, or a folder."""
    eval_url: str = ""
    """Where the validation shards lie, in the same kind of store as `url`; empty: nothing is evaluated."""
    num_classes: int = Field(default=1000, ge=1)
    """Labels run from 1 to this; a record outside stops the run."""

    @field_validator("url")
    @classmethod
    def _known_scheme(cls, url: str) -> str:
        parse_url(url)
        return url.rstrip("/") or "/"

    @field_validator("eval_url")
    @classmethod
    def _known_scheme_or_none(cls, url: str) -> str:
        return cls._known_scheme(url) if url else ""

    @model_validator(mode="after")
    def _one_store(self) -> Data:
        train, validation = parse_url(self.url), parse_url(self.eval_url or self.url)
        if train.scheme != validation.scheme:
            raise ValueError(f"eval_url is {self.eval_url!r}: expected the same kind of place as url, {self.url!r}")
        return self


class Storage(Section):
    """How it is read."""

    endpoints: list[str] | str = "embedded"
    """S3 addresses, `http://host:port`, all doors to one store; `embedded`, the store that `drawbar s3 up` started; or
    `environment`, what AWS_ENDPOINT_URL or S3_ENDPOINT names."""
    embedded_dir: str = ""
    """Folder of the embedded store; empty: the default of `drawbar s3 up`."""
    policy: Literal["rank", "round-robin", "least-outstanding"] = "rank"
    """`rank`: each rank uses endpoint number rank modulo their count (the ECS study's rule); `round-robin`: each
    request the next one; `least-outstanding`: each request the one with the fewest of this rank's under way."""
    addressing: Literal["path", "virtual"] = "path"
    """`path`: http://host/bucket/key; `virtual`: http://bucket.host/key."""
    request_bytes: int = Field(default=0, ge=0)
    """Largest range asked for in one GET (a record larger than it is asked for whole); at least 4096. 0: tuned at the
    start of the run (`input/reading.py`), and the result says what was chosen."""
    read_ahead: int = Field(default=0, ge=0, le=256)
    """GETs in flight, or arrived and not yet opened, per rank. 0: tuned. Bounds memory: beside these a rank has one
    body open for each of its lanes, so (lanes of the rank + read_ahead + 1) * request_bytes."""
    retries: int = Field(default=10, ge=0, le=100)
    """Tries after a failed GET before the run ends; each is counted."""
    retry_budget_s: float = Field(default=60.0, ge=0, le=86400)
    """After the first failure of a GET no try starts later than this."""
    check_version: bool = True
    """A shard whose ETag is not the listed one any more ends the run. Off: for endpoints that are doors to separate
    copies, whose ETags differ."""
    connect_timeout_s: float = Field(default=0.0, ge=0, le=86400)
    """0: S3_CONNECT_TIMEOUT_MSEC where that is set, else 5."""
    timeout_s: float = Field(default=0.0, ge=0, le=86400)
    """Longest silence of an endpoint that was asked; 0: S3_REQUEST_TIMEOUT_MSEC where that is set, else 30."""
    whole_timeout_s: float = Field(default=300.0, gt=0, le=86400)
    """For one whole GET, however steadily its bytes trickle."""

    @field_validator("request_bytes")
    @classmethod
    def _no_tiny_requests(cls, request_bytes: int) -> int:
        if 0 < request_bytes < 4096:
            raise ValueError(f"{request_bytes} is too little for a GET: expected at least 4096, or 0 (tuned)")
        return request_bytes

    @field_validator("endpoints")
    @classmethod
    def _addresses(cls, endpoints: list[str] | str) -> list[str] | str:
        if endpoints in ("embedded", "environment"):
            return endpoints
        if not endpoints or isinstance(endpoints, str):
            raise ValueError(
                f'{endpoints!r} is no list of addresses: expected ["http://host:port", …], "embedded" or "environment"'
            )
        for address in endpoints:
            check_address(address)
        if len(set(endpoints)) < len(endpoints):
            raise ValueError(f"{next(a for a in endpoints if endpoints.count(a) > 1)!r} stands there twice")
        return endpoints


class Input(Section):
    """From records to batches."""

    source: Literal["data", "memory", "constant"] = "data"
    """`memory`: the records of one GET of each rank, repeated from memory: storage rests. `constant`: one made-up
    batch, repeated; nothing is read or decoded. The result says so."""
    image_size: int = Field(default=224, ge=8, le=4096)
    """Pixels of the square crop."""
    decoder: Literal["auto", "region", "full"] = "auto"
    """`region`: only the crop window is decoded; `full`: the whole image is; `auto`: region where it was built, and the
    result says which. Equal pixels, but for `fast` decoding at a fraction of the size, which only `region` does."""
    decode: Literal["fast", "exact"] = "fast"
    """`fast`: fast integer DCT, chroma repeated instead of interpolated, 1/2, 1/4 or 1/8 of the size for windows at
    least that many times larger than the crop; `exact`: none of them, as MLPerf-style runs want."""
    crop_boxes: Literal["image", "objects"] = "image"
    """What a training crop must cover a tenth of: the image, or one of the record's object boxes if it has any."""
    distortions: bool = False
    """Random brightness, saturation, hue and contrast, as tf_cnn_benchmarks has them."""
    decode_threads: int = Field(default=0, ge=0, le=1024)
    """Per rank; 0: one per core that the ranks' compute threads leave free, at least 1."""
    prefetch_batches: int = Field(default=2, ge=1, le=64)
    """Decoded batches kept ready."""
    shuffle_buffer: int = Field(default=1024, ge=0, le=1_000_000)
    """Encoded records held for shuffling by all ranks together, an equal part for each lane; 0: each lane in shard
    order. Bounds memory: a rank holds at most shuffle_buffer / ranks records."""
    lanes: int = Field(default=16, ge=1, le=4096)
    """Slices into which an epoch is cut and of which every global batch takes records in turn. Where the ranks divide
    them, the order of training does not depend on the ranks, and an epoch may be finished by another number of ranks.
    Otherwise: the smallest multiple of the ranks that is no fewer."""
    last_batch: Literal["drop", "pad", "carry"] = "carry"
    """Records of an epoch that do not fill a global batch: left out in this epoch; filled up with records trained a
    second time, which are counted; or trained first in the next epoch. Sets whose records are not known: carry."""
    seed: int = Field(default=1, ge=0, lt=2**32)
    """Order and augmentation follow from it alone."""


class Model(Section):
    name: str = "resnet50"
    """One of `drawbar.models.names.MODEL_NAMES`."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """`auto`: bf16 on GPUs and on CPUs with AVX512-BF16 or AMX, fp32 elsewhere."""
    channels_last: bool = True

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        from drawbar.models.names import MODEL_NAMES

        if name not in MODEL_NAMES:
            near = difflib.get_close_matches(name, MODEL_NAMES, 1, 0.4)
            raise ValueError(
                f"unknown model {name!r}"
                + (f"; did you mean {near[0]!r}?" if near else "")
                + f" (known: {', '.join(MODEL_NAMES)})"
            )
        return name


class Train(Section):
    batch_size: int = Field(default=32, ge=1)
    """Per rank."""
    warmup_steps: int = Field(default=10, ge=0)
    """Recorded and marked, left out of the throughput; trained like all others, and part of time to quality."""
    steps: int = Field(default=100, ge=1)
    """Measured steps, the same on every rank."""
    epochs: float = Field(default=0.0, ge=0)
    """Passes over the training set, warm-up steps included, instead of `steps`. Needs the number of its records."""
    learning_rate: float = Field(default=0.01, ge=0)
    momentum: float = Field(default=0.9, ge=0, lt=1)
    weight_decay: float = Field(default=1e-4, ge=0)
    display_every: int = Field(default=10, ge=1)
    """Steps between printed lines."""


class Eval(Section):
    """When the model is evaluated on all of `data.eval_url`; without a cadence: after every epoch."""

    every_epochs: int = Field(default=0, ge=0)
    offset_epochs: int = Field(default=-1, ge=-1)
    """As in MLPerf's rules, where epochs are counted from 0: the first evaluation comes after epoch number
    `offset_epochs`, so with every 4 and offset 3 after 4, 8, 12 … epochs. -1: `every_epochs` - 1."""
    at_epochs: list[int] = []
    """After so many epochs each, instead of a regular cadence."""
    every_steps: int = Field(default=0, ge=0)
    """Warm-up steps included."""
    batch_size: int = Field(default=0, ge=0)
    """Per rank; 0: `train.batch_size`. The last batch of a rank may be smaller."""
    on_clock: bool = True
    """Whether evaluations count in time to quality, as MLPerf's rules want. Off: they are left out, and the result
    says so."""

    @model_validator(mode="after")
    def _one_cadence(self) -> Eval:
        given = [name for name in ("every_epochs", "at_epochs", "every_steps") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given: expected one of them")
        if self.offset_epochs >= max(1, self.every_epochs):
            raise ValueError(f"offset_epochs is {self.offset_epochs}: expected less than every_epochs")
        if sorted(set(self.at_epochs)) != self.at_epochs or min(self.at_epochs, default=1) < 1:
            raise ValueError(f"at_epochs is {self.at_epochs}: expected numbers from 1, each larger than the last")
        return self


Metric = Literal["top1", "top5", "loss", "box_ap", "mask_ap"]
"""All from 0 to 1, but for the loss, whose targets are met from above."""


class Quality(Section):
    """Train until the model is good enough. `docs/quality.md` has the clock's rules."""

    target: dict[Metric, float] = {}
    """Such as `{ top1 = 0.759 }`; several must be met at the same evaluation. Empty: trained as long as `[train]`
    says."""
    limit_epochs: float = Field(default=0.0, ge=0)
    """The run ends here where the target was not met; stands in the place of `train.epochs`. 0: `[train]` says."""
    repeats: int = Field(default=1, ge=1, le=100)
    """Runs with different seeds, of which the fastest and the slowest are dropped."""

    @property
    def targets(self) -> dict[str, float]:
        return {str(name): value for name, value in self.target.items()}

    @model_validator(mode="after")
    def _fits_together(self) -> Quality:
        for name, value in self.target.items():
            if value < 0 or (name != "loss" and value > 1):
                raise ValueError(f"target of {name} is {value:g}: expected a share from 0 to 1, such as 0.75")
        for key, needed in (("limit_epochs", self.limit_epochs > 0), ("repeats", self.repeats > 1)):
            if needed and not self.target:
                raise ValueError(
                    f"{key} is {getattr(self, key):g}: it needs a target, such as target = {{ top1 = 0.75 }}"
                )
        return self


class Launch(Section):
    ranks: int = Field(default=1, ge=1, le=4096)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads_per_rank: int = Field(default=0, ge=0, le=4096)
    """Compute threads on CPU; 0: cores divided by the ranks on a host, at least 1."""
    allocator: Literal["keep_large_blocks", "system"] = "keep_large_blocks"
    """`keep_large_blocks`: glibc is told before a rank starts not to return large blocks to the kernel
    (MALLOC_MMAP_MAX_=0, high MALLOC_TRIM_THRESHOLD_ and MALLOC_TOP_PAD_, MALLOC_ARENA_MAX=2); far fewer page faults on
    CPU."""
    stall_timeout_s: float = Field(default=300.0, gt=0, le=86400)
    """A rank that finishes no step for this long ends the run."""


class CacheState(Section):
    start: Literal["cold", "any"] = "cold"
    """`cold`: flush what can be flushed before the first read, and show that it was; `any`: leave it as it is."""


class Faults(Section):
    """Deliberate faults, for checking that Drawbar's own figures follow them. Named in the result when used."""

    slow_rank: int = Field(default=-1, ge=-1)
    slow_step_s: float = Field(default=0.0, ge=0)
    """Added to each step of `slow_rank`."""


class Recipe(Section):
    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    data: Data = Data()
    storage: Storage = Storage()
    input: Input = Input()
    model: Model = Model()
    train: Train = Train()
    eval: Eval = Eval()
    quality: Quality = Quality()
    launch: Launch = Launch()
    cache: CacheState = CacheState()
    faults: Faults = Faults()

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        if self.faults.slow_rank >= self.launch.ranks:
            raise ValueError(f"faults.slow_rank is {self.faults.slow_rank}, but there are {self.launch.ranks} ranks")
        self._check_length()
        self._check_evaluation()
        return self

    @property
    def epochs(self) -> float:
        """How long the run may be, in passes over the training set; 0: `train.steps` says."""
        return self.quality.limit_epochs or self.train.epochs

    def _check_length(self) -> None:
        lengths = {
            "train.steps": "steps" in self.train.model_fields_set,
            "train.epochs": self.train.epochs > 0,
            "quality.limit_epochs": self.quality.limit_epochs > 0,
        }
        given = [name for name, is_given in lengths.items() if is_given]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} all say how long the run is: expected one of them")
        if self.epochs and self.input.source != "data":
            raise ValueError(f"{given[0]} counts passes over a data set, input.source is {self.input.source!r}")

    def _check_evaluation(self) -> None:
        if self.data.eval_url:
            if self.input.source != "data":
                raise ValueError(f'data.eval_url needs input.source = "data", it is {self.input.source!r}')
            return
        if self.quality.target:
            raise ValueError("quality.target needs a validation set: data.eval_url is empty")
        if self.eval != Eval():
            raise ValueError("[eval] needs a validation set: data.eval_url is empty")

    def sha256(self) -> str:
        """Of the canonical JSON, equal on all ranks; where the embedded store lies is no part of the job."""
        job = self.model_dump(exclude={"storage": {"embedded_dir"}})
        return hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()

    def to_toml(self) -> str:
        """The whole recipe, defaults included; but of the ways to say how long a run is only the one that holds."""
        return tomli_w.dumps(self.model_dump(exclude={"train": {"steps"}} if self.epochs else None))


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads and checks a recipe; `overrides` are `section.key=value`, the value in TOML or plain text.

    Raises RecipeError naming the key, the value seen and what would be right.
    """
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise RecipeError(f"no recipe: {path}", hint="a TOML file, such as recipes/quickstart.toml") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read recipe {path}: {error}") from None
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{path} is no TOML: {error}") from None
    for override in overrides:
        _apply(tree, override)
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        raise RecipeError("; ".join(_explain(item) for item in error.errors())) from None


def _apply(tree: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise RecipeError(f"--set {override!r}: expected section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise RecipeError(f"--set {override!r}: {key} is no section")
    tree[keys[-1]] = value


def _explain(item: Any) -> str:
    """One pydantic complaint in one line; an unknown key gets the nearest known one."""
    location = [str(part) for part in item["loc"] if not str(part).startswith("list[") and part not in ("str", "[key]")]
    name = ".".join(location)
    if item["type"] == "extra_forbidden":
        section: type[BaseModel] = Recipe
        for key in location[:-1]:
            section = section.model_fields[key].annotation  # type: ignore[assignment]
        known = list(section.model_fields)
        elsewhere = [f"{part}.{location[-1]}" for part in Recipe.model_fields if location[-1] in _keys_of(part)]
        if len(location) == 1 and elsewhere:
            return f"unknown recipe key {name}; did you mean {' or '.join(elsewhere)}?"
        near = difflib.get_close_matches(location[-1], known, 1, 0.4)
        return f"unknown recipe key {name}" + (
            f"; did you mean {near[0]}?" if near else f" (known: {', '.join(known)})"
        )
    if item["type"] == "value_error":
        return (f"{name}: " if name else "") + str(item["ctx"]["error"])
    message = item["msg"][0].lower() + item["msg"][1:]
    return f"{name} is {item['input']!r}: {message}"


def _keys_of(section: str) -> list[str]:
    kind = Recipe.model_fields[section].annotation
    return list(kind.model_fields) if isinstance(kind, type) and issubclass(kind, BaseModel) else []
