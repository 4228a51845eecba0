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
from drawbar.models.names import find_model
from drawbar.storage.urls import parse_url

MAX_EPOCHS = 1e6
"""Far beyond any training; what follows from it, in steps, is still a number."""


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
    image_size: int = Field(default=0, ge=0, le=4096)
    """Pixels of the square crop, at least 8. 0: the model's own, which the recipe then holds."""
    decoder: Literal["auto", "region", "full", "gpu"] = "auto"
    """`region`: only the crop window is decoded; `full`: the whole image is; `auto`: region where it was built, and the
    result says which. Equal pixels, but for `fast` decoding at a fraction of the size, which only `region` does. `gpu`:
    the rank's GPU decodes, by nvImageCodec (docs/decode.md)."""
    decode: Literal["fast", "exact"] = "fast"
    """`fast`: fast integer DCT, chroma repeated instead of interpolated, 1/2, 1/4 or 1/8 of the size for windows at
    least that many times larger than the crop; `exact`: none of them, as MLPerf-style runs want."""
    crop_boxes: Literal["image", "objects"] = "image"
    """What a training crop must cover a tenth of: the image, or one of the record's object boxes if it has any."""
    augment: Literal["crop", "none"] = "crop"
    """Of training images with a label. `crop`: ImageNet's random crop and flip; `none`: resized and cut as for
    evaluation, for pictures such as digits, of which neither a part nor a mirror image is the same thing."""
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
    on_bad: Literal["fail", "skip"] = "fail"
    """A record that gives no sample, as its image cannot be decoded or its Example lacks image or label. `fail`: the
    run ends with shard, byte offset and reason; `skip`: the next good record of its batch is trained a second time in
    its place, and counted, so that steps and the plan stay as they are. Framing and CRC errors end a run either way."""
    seed: int = Field(default=1, ge=0, lt=2**32)
    """Order and augmentation follow from it alone."""

    @field_validator("image_size")
    @classmethod
    def _no_tiny_images(cls, image_size: int) -> int:
        if 0 < image_size < 8:
            raise ValueError(f"{image_size} pixels are too few: expected at least 8, or 0 (the model's own)")
        return image_size


class Model(Section):
    name: str = "resnet50"
    """One of `drawbar.models.names.MODEL_NAMES` (`drawbar models` lists them), `torchvision:NAME` or `timm:NAME`."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """`auto`: bf16 on GPUs and on CPUs with AVX512-BF16 or AMX, fp32 elsewhere. Weights and gradients are always fp32;
    bf16 and fp16 are autocast's. `tf32` and `fp16` need a GPU."""
    loss_scale: float = Field(default=65536.0, ge=1, le=2**24)
    """Of fp16 at the start. Halved when a gradient overflows, whose update is skipped; doubled after 2000 good ones."""
    channels_last: bool = True
    """NHWC in memory; off: NCHW."""
    compile: bool = False
    """torch.compile. The first step compiles: it must be one of `train.warmup_steps`."""
    weights: str = ""
    """File of weights to begin with, such as a pre-trained backbone: safetensors, or what `torch.save` wrote (`.pth`),
    read without executing code from it. The classifier may have another number of classes: it then keeps its random
    start, and the result says so. Empty: all weights are random. A resumed run begins with its checkpoint's."""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        find_model(name)
        return name


PixelScale = Literal["imagenet", "caffe"]


class Detection(Section):
    """Of the models that find objects, `ssd_resnet34` and `maskrcnn_resnet50_fpn`. Defaults are MLPerf's; the small
    variants that a CPU can train have their own trunk, heads and sizes."""

    short_side: int = Field(default=800, ge=32, le=4096)
    """Mask R-CNN: what an image's short side becomes, or less, so that the long one is within `long_side`. SSD sees
    squares of `input.image_size`."""
    long_side: int = Field(default=1333, ge=32, le=4096)
    group_batches: int = Field(default=8, ge=1, le=1024)
    """Mask R-CNN: so many batches' records are sorted by aspect ratio and cut into batches anew, which then pad
    little. 1: batches are as they come."""
    augment: Literal["ssd", "flip"] = "ssd"
    """SSD: the reference's random crop, flip and colour jitter; or flips alone, for sets that show objects at the sizes
    at which they are to be found. Mask R-CNN's images are only flipped."""
    pixels: PixelScale = "imagenet"
    """`imagenet`: RGB, by ImageNet's means and deviations; `caffe`: BGR less the means, as the weights of Mask R-CNN's
    reference want them."""
    blocks: list[int] = []
    """Basic residual blocks in each stage of a trunk (SSD 3, Mask R-CNN 4 stages); empty: the model's own trunk."""
    channels: int = Field(default=64, ge=16, le=256)
    """Of the first stage of such a trunk and in proportion of SSD's further layers; each stage has twice the last's.
    At least 16: with 8, PyTorch 2.14 crashes on a CPU in the backward of a strided 1x1 convolution, channels last."""
    norm: Literal["model", "batch", "frozen", "group"] = "model"
    """`model`: SSD's trunk batch norm, its further layers none, Mask R-CNN frozen batch norm, which both need trained
    weights to be of use; others: of every layer but the last ones."""
    head_channels: int = Field(default=256, ge=8, le=1024)
    """Mask R-CNN: of pyramid, proposal and mask layers."""
    head_features: int = Field(default=1024, ge=8, le=4096)
    """Mask R-CNN: of the two layers behind a region's box."""
    box_sizes: list[int] = []
    """Sides of default boxes (SSD, 7) or anchors (Mask R-CNN, 5), in pixels of the sample, ascending; empty: the
    model's own, of SSD in proportion to the image size."""
    proposals: int = Field(default=2000, ge=1, le=10000)
    """Mask R-CNN: of an image in training; half of it in evaluation."""
    regions: int = Field(default=512, ge=4, le=4096)
    """Mask R-CNN: sampled of an image for the heads' loss, up to a quarter of them positive."""
    detections: int = Field(default=0, ge=0, le=1000)
    """Kept of an image; 0: the model's own, SSD 200, Mask R-CNN 100."""

    @model_validator(mode="after")
    def _fits_together(self) -> Detection:
        if self.long_side < self.short_side:
            raise ValueError(f"long_side is {self.long_side}, less than short_side, which is {self.short_side}")
        if self.blocks and (len(self.blocks) not in (3, 4) or min(self.blocks) < 1):
            raise ValueError(f"blocks is {self.blocks}: expected 3 counts (SSD) or 4 (Mask R-CNN), each at least 1")
        if self.box_sizes and (
            len(self.box_sizes) not in (5, 7) or sorted({1, *self.box_sizes})[-len(self.box_sizes) :] != self.box_sizes
        ):
            raise ValueError(f"box_sizes is {self.box_sizes}: expected 7 (SSD) or 5 (Mask R-CNN) ascending sides")
        return self


class Train(Section):
    batch_size: int = Field(default=32, ge=1)
    """Per rank."""
    warmup_steps: int = Field(default=10, ge=0)
    """Recorded and marked, left out of the throughput; trained like all others, and part of time to quality."""
    steps: int = Field(default=100, ge=1)
    """Measured steps, the same on every rank."""
    accumulate: int = Field(default=1, ge=1)
    """Parts of each batch that are trained one after another before one exchange and update; must divide `batch_size`.
    Batch norm sees each part alone."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Share of each target that is spread evenly over all classes."""
    epochs: float = Field(default=0.0, ge=0, le=MAX_EPOCHS)
    """Passes over the training set, warm-up steps included, instead of `steps`. Needs the number of its records."""
    display_every: int = Field(default=10, ge=1)
    """Steps between printed lines."""

    def steps_from(self, first_step: int, total_steps: int) -> tuple[int, int]:
        """Warm-up and measured steps of a run that begins with this step of so many (see `epochs.run_steps`): what is
        left, the first ones of it warm-up again, as caches are cold; at least one is measured."""
        left = total_steps - first_step
        warmup_steps = min(self.warmup_steps, left - 1)
        return warmup_steps, left - warmup_steps


class Optimizer(Section):
    """How weights are updated. The learning rate is the full one: `[schedule]` says what each step has of it."""

    name: Literal["sgd", "lars"] = "sgd"
    """`lars`: SGD whose rate is scaled for each tensor by trust * |w| / (|g| + weight_decay * |w| + epsilon), as in
    MLPerf's reference."""
    learning_rate: float = Field(default=0.01, ge=0)
    momentum: float = Field(default=0.9, ge=0, lt=1)
    nesterov: bool = False
    weight_decay: float = Field(default=1e-4, ge=0)
    no_decay: list[Literal["norm", "bias"]] = ["norm", "bias"]
    """Which parameters have no weight decay, and no scaling by LARS: `norm`, those of normalisation layers; `bias`, the
    biases of all other layers. MLPerf's ResNet leaves out both, its SSD none, its Mask R-CNN the biases."""
    bias_lr_factor: float = Field(default=1.0, gt=0)
    """Learning rate of biases of other than normalisation layers / that of weights; 2 in Mask R-CNN."""
    lars_trust: float = Field(default=0.001, gt=0)
    lars_epsilon: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _fits_together(self) -> Optimizer:
        if self.nesterov and (self.momentum == 0 or self.name == "lars"):
            raise ValueError(f"nesterov goes with name sgd and a momentum, not with {self.name} and {self.momentum}")
        return self


class Schedule(Section):
    """The learning rate of each step, as a share of `optimizer.learning_rate`. Steps are counted from 0, those that
    `train.warmup_steps` leaves out of the figures included."""

    name: Literal["constant", "step", "polynomial", "cosine"] = "constant"
    """After the warm-up: the same; multiplied at each boundary; falling to `end_learning_rate` at `length`."""
    unit: Literal["steps", "epochs"] = "steps"
    """Of `warmup`, `boundaries` and `length`. Epochs need a data set whose records are counted."""
    warmup: float = Field(default=0.0, ge=0)
    """How long the rate rises linearly, from `warmup_factor` of the full rate at step 0."""
    warmup_factor: float = Field(default=0.0, ge=0, le=1)
    boundaries: list[float] = []
    """Of `step`, counted from the start of training."""
    factor: float | list[float] = 0.1
    """What the rate is multiplied by at every boundary, or at each."""
    length: float = Field(default=0.0, ge=0)
    """Of `polynomial` and `cosine`, warm-up included; 0: as long as the run."""
    power: float = Field(default=2.0, gt=0)
    """Of `polynomial`."""
    end_learning_rate: float = Field(default=0.0, ge=0)
    """Of `polynomial` and `cosine`."""
    reference_batch: int = Field(default=0, ge=0)
    """Linear scaling: `optimizer.learning_rate` is meant for this global batch, and grows as the global batch does.
    0: it is used as it stands."""

    @model_validator(mode="after")
    def _fits_together(self) -> Schedule:
        if bool(self.boundaries) != (self.name == "step"):
            raise ValueError(f"boundaries are {self.boundaries}, name is {self.name!r}: `step` needs some, others none")
        if sorted(set(self.boundaries)) != self.boundaries or min(self.boundaries, default=1) <= 0:
            raise ValueError(f"boundaries are {self.boundaries}: expected numbers above 0, each larger than the last")
        if isinstance(self.factor, list) and len(self.factor) != len(self.boundaries):
            raise ValueError(f"{len(self.factor)} factors for {len(self.boundaries)} boundaries")
        if min(self.factors, default=1) <= 0:
            raise ValueError(f"factor is {self.factor}: expected numbers above 0")
        if 0 < self.length <= self.warmup:
            raise ValueError(f"length is {self.length:g}, of which the warm-up takes {self.warmup:g}")
        return self

    @property
    def factors(self) -> list[float]:
        """One for each boundary."""
        return self.factor if isinstance(self.factor, list) else [self.factor] * len(self.boundaries)


class Summaries(Section):
    """TensorBoard's event files, written by rank 0 between steps. They need the extra `tensorboard`."""

    verbosity: int = Field(default=0, ge=0, le=3)
    """0: none; 1: loss, learning rate, images/s of rank 0; 2: also a histogram of all gradients; 3: also one of each
    weight and of its gradient. As in tf_cnn_benchmarks, but for its images at 3."""
    every_steps: int = Field(default=10, ge=0)
    """Steps from one to the next, warm-up included; 0: none."""
    dir: str = ""
    """The train directory, a folder. Empty: `train` in the run directory. `{time}` in it becomes the time of the start,
    such as 2026-12-01-00-31-46."""

    @field_validator("dir")
    @classmethod
    def _is_folder(cls, folder: str) -> str:
        if "://" in folder:
            raise ValueError(f"{folder!r} is no folder: event files are written to a local or shared file system")
        return folder

    @property
    def wanted(self) -> bool:
        return self.verbosity > 0 and self.every_steps > 0


class Exchange(Section):
    """How ranks average their gradients: DistributedDataParallel's all-reduce, bucket by bucket during backward."""

    bucket_mib: float = Field(default=0.0, ge=0, le=65536)
    """Gradients sent together; 0: PyTorch's 25 MiB, after a first one of 1 MiB."""
    compression: Literal["none", "fp16", "bf16"] = "none"
    """Number format in which gradients are sent and added up."""
    delayed: bool = False
    """All buckets are sent once backward is over, so that nothing overlaps (the SSD of the V100 study)."""


class Emulate(Section):
    """An accelerator that is not there: batches are made and handed over, the step takes a given time, the model's
    gradients are exchanged, and nothing is trained. Named in the result when used."""

    step_s: float = Field(default=0.0, ge=0, le=3600)
    """Of forward, backward and update together. 0: the model is really trained."""
    gradients: bool = True
    """As many bytes as the model has gradients are all-reduced; off: ranks do not wait for each other."""
    backward_share: float = Field(default=2 / 3, gt=0, le=1)
    """Part of `step_s`, at its end, in which gradients become ready, in proportion to their bytes."""


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
    limit_epochs: float = Field(default=0.0, ge=0, le=MAX_EPOCHS)
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
    """Where the ranks run, and who starts them."""

    ranks: int = Field(default=1, ge=1, le=4096)
    launcher: Literal["auto", "local", "mpirun", "srun"] = "auto"
    """`local`: torchrun on this host; `mpirun`: Open MPI 4 or 5 on the named hosts; `srun`: Slurm, in an allocation or
    with one of its own. `auto`: mpirun where hosts are named, srun inside an allocation of several, local otherwise."""
    hosts: list[str] = []
    """`host` or `host:slots`, in the order of the ranks; one slot where none is said."""
    host_file: str = ""
    """Instead of `hosts`: a file with one of them a line, or Open MPI's `host slots=2`."""
    map_by: Literal["slot", "node"] = "slot"
    """`slot`: a host's slots are filled before the next one's, as in the ECS study; `node`: one rank a host in turn."""
    bind_to: Literal["none", "core", "socket", "numa"] = "none"
    """What mpirun binds a rank to."""
    report_bindings: bool = False
    flags: list[str] = []
    """Further words for the launcher's command line, as they are."""
    forward: list[str] = []
    """Names of further variables that ranks on other hosts get. Those of storage, NCCL, Gloo, OpenMP and Drawbar
    itself always go."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads_per_rank: int = Field(default=0, ge=0, le=4096)
    """Compute threads on CPU; 0: cores divided by the ranks on a host, at least 1."""
    allocator: Literal["keep_large_blocks", "system"] = "keep_large_blocks"
    """`keep_large_blocks`: glibc is told before a rank starts not to return large blocks to the kernel
    (MALLOC_MMAP_MAX_=0, high MALLOC_TRIM_THRESHOLD_ and MALLOC_TOP_PAD_, MALLOC_ARENA_MAX=2); far fewer page faults on
    CPU."""
    stall_timeout_s: float = Field(default=300.0, gt=0, le=86400)
    """A rank that finishes no step for this long ends the run."""

    @model_validator(mode="after")
    def _one_list_of_hosts(self) -> Launch:
        if self.hosts and self.host_file:
            raise ValueError("both hosts and host_file are given: expected one of them")
        if self.launcher == "mpirun" and not (self.hosts or self.host_file):
            raise ValueError('launcher is "mpirun", but there are neither hosts nor a host_file')
        return self


class Checkpoint(Section):
    """Where, when and how often the state of training is saved, and whether a run goes on from there."""

    url: str = ""
    """`s3://bucket/prefix` or a folder, of this training alone; empty: nothing is saved."""
    endpoint: str = ""
    """S3 address for it, `http://host:port`; empty: the first of `storage.endpoints`."""
    every_steps: int = Field(default=0, ge=0)
    """0: not by steps. The state after the last step is always saved."""
    every_epochs: int = Field(default=0, ge=0)
    """0: not by epochs. Needs a data set whose records are counted."""
    keep: int = Field(default=2, ge=1)
    """The newest ones; older ones are deleted once a new one is whole."""
    resume: str = "never"
    """`never`: training begins anew, and `url` must hold no checkpoint. `auto`: it goes on from the newest one in
    `url`, and begins anew where there is none. Else the place of a checkpoint, or of several, of
    which the newest is taken."""

    @field_validator("url", "resume")
    @classmethod
    def _known_place(cls, url: str) -> str:
        if not url or url in ("never", "auto"):
            return url
        if parse_url(url).scheme not in ("file", "s3"):
            raise ValueError(f"{url!r}: expected s3://bucket/prefix or a folder")
        return url.rstrip("/") or "/"

    @field_validator("endpoint")
    @classmethod
    def _address(cls, endpoint: str) -> str:
        if endpoint:
            check_address(endpoint)
        return endpoint

    @model_validator(mode="after")
    def _fits_together(self) -> Checkpoint:
        if not self.url and (self.every_steps or self.every_epochs):
            raise ValueError("url is empty: checkpoints that are asked for need a place")
        if not self.resume or (self.resume == "auto" and not self.url):
            raise ValueError(
                f'resume is {self.resume!r}, url {self.url!r}: expected "never", a place, or "auto" and a url'
            )
        return self


class CacheState(Section):
    start: Literal["cold", "any"] = "cold"
    """`cold`: flush what can be flushed before the first read, and show that it was; `any`: leave it as it is."""
    drop_caches: bool = True
    """Sets in files, where Drawbar runs as root: each host's whole page cache is emptied, metadata included, and not
    only the set's files put out of it."""
    storage_flush_command: list[str] = []
    """Program and arguments, run once before the first read to empty the storage's own caches; no shell reads them, and
    nothing is on its stdin. Empty: none. The result says that it ran, and that nothing proves what it did."""
    storage_flush_timeout_s: float = Field(default=300.0, gt=0, le=86400)
    """After it that command is stopped, with all that it started, and the run ends."""

    @model_validator(mode="after")
    def _command_is_run(self) -> CacheState:
        if self.storage_flush_command and self.start != "cold":
            raise ValueError(f'storage_flush_command is given, but start is "{self.start}": it would not be run')
        return self

    @field_validator("storage_flush_command")
    @classmethod
    def _words(cls, command: list[str]) -> list[str]:
        if (command and not command[0]) or any("\0" in word for word in command):
            raise ValueError(f"{command!r} names no program: expected a list of words, the program first")
        return command


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
    detection: Detection = Detection()
    train: Train = Train()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    summaries: Summaries = Summaries()
    checkpoint: Checkpoint = Checkpoint()
    exchange: Exchange = Exchange()
    emulate: Emulate = Emulate()
    eval: Eval = Eval()
    quality: Quality = Quality()
    launch: Launch = Launch()
    cache: CacheState = CacheState()
    faults: Faults = Faults()

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        if self.input.decoder == "gpu" and self.launch.device == "cpu":
            raise ValueError('input.decoder is "gpu", but launch.device is "cpu"')
        if self.input.decoder == "gpu" and self.input.augment == "none":
            raise ValueError('input.augment is "none", but input.decoder is "gpu", which decodes random crops')
        if self.input.augment == "none" and (self.input.distortions or self.input.crop_boxes == "objects"):
            raise ValueError('input.augment is "none": distortions and crop_boxes = "objects" have no effect')
        if self.input.decoder == "gpu" and self.input.distortions:
            raise ValueError(
                'input.distortions is true, but colours are distorted on the CPU and input.decoder is "gpu"'
            )
        if self.faults.slow_rank >= self.launch.ranks:
            raise ValueError(f"faults.slow_rank is {self.faults.slow_rank}, but there are {self.launch.ranks} ranks")
        if self.input.on_bad == "skip" and self.train.batch_size < 2:
            raise ValueError(
                'input.on_bad = "skip" needs a train.batch_size of at least 2: another record of the batch stands in'
            )
        if self.input.image_size == 0:
            # Everybody who reads the recipe later sees the number. A frozen model is filled in through its dict.
            size = find_model(self.model.name).image_size
            self.__dict__["input"] = self.input.model_copy(update={"image_size": size})
        self._check_detection()
        if self.train.batch_size % self.train.accumulate:
            raise ValueError(
                f"train.accumulate is {self.train.accumulate}, which does not divide train.batch_size "
                f"({self.train.batch_size})"
            )
        if self.emulate.step_s:
            kept = {
                "checkpoint.url": self.checkpoint.url,
                "model.weights": self.model.weights,
                "data.eval_url": self.data.eval_url,
            }
            for key, value in kept.items():
                if value:
                    raise ValueError(f"{key} is {value!r}, but emulate.step_s trains no model")
        if self.model.compile and not self.train.warmup_steps:
            raise ValueError("model.compile needs train.warmup_steps: the first step compiles, and is no measured one")
        self._check_length()
        self._check_evaluation()
        return self

    def _check_detection(self) -> None:
        from drawbar.models.names import DETECTORS, MASK_RCNN

        name, settings = self.model.name, self.detection
        if name not in DETECTORS:
            return
        if self.input.decoder == "gpu":
            raise ValueError(f'input.decoder is "gpu", which decodes images with one label each, not those of {name}')
        without_effect = {
            "input.distortions": self.input.distortions,
            "input.augment": self.input.augment != "crop",
            "input.crop_boxes": self.input.crop_boxes != "image",
            "train.label_smoothing": self.train.label_smoothing > 0,
            "detection.augment": name == MASK_RCNN and settings.augment != "ssd",
        }
        for key, is_set in without_effect.items():
            if is_set:
                raise ValueError(f"{key} is set, which has no effect on {name}")
        stages, sides = (4, 5) if name == MASK_RCNN else (3, 7)
        if len(settings.blocks) not in (0, stages):
            raise ValueError(f"detection.blocks is {settings.blocks}: {name} has {stages} stages")
        if len(settings.box_sizes) not in (0, sides):
            raise ValueError(f"detection.box_sizes is {settings.box_sizes}: {name} needs {sides} sides")
        if name == MASK_RCNN and self.checkpoint.every_steps % settings.group_batches:
            raise ValueError(
                f"checkpoint.every_steps is {self.checkpoint.every_steps}, detection.group_batches "
                f"{settings.group_batches}: expected a multiple, as reading cannot be taken up within a group"
            )

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
        """Of the canonical JSON, equal on all ranks. Where the embedded store lies and where event files go is no part
        of the job."""
        job = self.model_dump(exclude={"storage": {"embedded_dir"}, "summaries": {"dir"}})
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
    return recipe_from_tree(tree, overrides)


def recipe_from_tree(tree: dict[str, Any], overrides: Sequence[str] = ()) -> Recipe:
    """As `load_recipe`, from the sections as they stand in a file; `tree` is changed by the overrides."""
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
        if elsewhere:
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
