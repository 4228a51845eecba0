"""Which of tf_cnn_benchmarks' flags Drawbar has a counterpart for. Everything else is unknown to it."""

from __future__ import annotations

from dataclasses import dataclass

from drawbar.tf_cnn.flags import Kind, Value


@dataclass(frozen=True, slots=True)
class Key:
    """The value goes to a recipe key as it stands."""

    kind: Kind
    key: str


@dataclass(frozen=True, slots=True)
class Choice:
    """Each value has its counterpart; another one cannot be done."""

    kind: Kind
    key: str
    values: dict[Value, Value]


@dataclass(frozen=True, slots=True)
class Always:
    """What these values ask for is so in every run."""

    kind: Kind
    values: tuple[Value, ...]
    words: str
    tuning: bool = False
    """Another value changes how fast the original is, not what it does: it is an unknown flag like others. Without
    this, another value asks for something else, and is refused even with `--ignore-unknown`."""


@dataclass(frozen=True, slots=True)
class Special:
    """Says something only together with other flags (`translate.py`)."""

    kind: Kind


_COMPILE = Key("bool", "model.compile")

TABLE: dict[str, Key | Choice | Always | Special] = {
    # What is trained, and how long.
    "model": Key("str", "model.name"),
    "batch_size": Special("int"),
    "num_batches": Key("int", "train.steps"),
    "num_epochs": Key("float", "train.epochs"),
    "num_warmup_batches": Key("int", "train.warmup_steps"),
    "display_every": Key("int", "train.display_every"),
    "eval": Always("bool", (False,), "a run trains"),
    "forward_only": Always("bool", (False,), "a run trains"),
    "print_training_accuracy": Always("bool", (False,), "not counted", tuning=True),
    "tf_random_seed": Key("int", "input.seed"),
    # The input.
    "data_dir": Special("str"),
    "data_name": Always("str", ("imagenet",), "records are ImageNet's"),
    "ecs_node": Special("str"),
    "distortions": Key("bool", "input.distortions"),
    "resize_method": Always("str", ("bilinear",), "bilinear"),
    "input_preprocessor": Always("str", ("default",), "as the default"),
    "ml_perf": Always("bool", (False,), "pixels are normalised by mean and standard deviation"),
    "fuse_decode_and_crop": Choice("bool", "input.decoder", {True: "auto", False: "full"}),
    "use_datasets": Always("bool", (True,), "records are read as a stream"),
    "datasets_use_prefetch": Always("bool", (True,), "batches are kept ready"),
    "datasets_prefetch_buffer_size": Key("int", "input.prefetch_batches"),
    "datasets_num_private_threads": Key("int", "input.decode_threads"),
    "datasets_use_caching": Always("bool", (False,), "nothing is cached", tuning=True),
    "datasets_repeat_cached_sample": Choice("bool", "input.source", {True: "memory", False: "data"}),
    # Number format, layout, devices.
    "use_fp16": Choice("bool", "model.precision", {True: "fp16", False: "fp32"}),
    "fp16_loss_scale": Key("float", "model.loss_scale"),
    "fp16_vars": Always("bool", (False,), "weights are kept in fp32"),
    "data_format": Choice("str", "model.channels_last", {"NCHW": False, "NHWC": True}),
    "device": Choice("str", "launch.device", {"gpu": "cuda", "GPU": "cuda", "cpu": "cpu", "CPU": "cpu"}),
    "num_gpus": Key("int", "launch.ranks"),
    "num_intra_threads": Key("int", "launch.threads_per_rank"),
    "num_inter_threads": Always("int", (0,), "no such threads", tuning=True),
    "xla": _COMPILE,
    "xla_compile": _COMPILE,
    # Optimizer.
    "optimizer": Special("str"),
    "momentum": Special("float"),
    "weight_decay": Key("float", "optimizer.weight_decay"),
    "init_learning_rate": Key("float", "optimizer.learning_rate"),
    # The exchange of gradients.
    "variable_update": Special("str"),
    "horovod_device": Special("str"),
    "cross_replica_sync": Always("bool", (True,), "ranks train in step"),
    "gradient_repacking": Always("int", (0,), "gradients go in DistributedDataParallel's buckets", tuning=True),
    "sync_on_finish": Always("bool", (True, False), "a step counts when the device has finished it"),
    "staged_vars": Always("bool", (False,), "weights are never a step behind"),
    # What is written.
    "summary_verbosity": Key("int", "summaries.verbosity"),
    "save_summaries_steps": Key("int", "summaries.every_steps"),
    "train_dir": Key("str", "summaries.dir"),
    "save_model_secs": Always("int", (0,), "no checkpoint is written", tuning=True),
}

MODEL_BATCH_SIZE = {
    "alexnet": 512,
    "vgg11": 64,
    "vgg16": 64,
    "vgg19": 64,
    "resnet50": 64,
    "resnet50_v1.5": 64,
    "resnet50_v2": 64,
}
"""Of a device, where the command line has none (0); 32 for the others."""
