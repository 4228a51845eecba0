"""The shape of result.json, the stable contract of a run directory. Types only; the numbers are made elsewhere.

Units stand in the names; MB is 10^6 bytes. A figure that could not be measured is null, never 0 and never left out.
Schema history: 1 = first.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

RESULT_SCHEMA = 1

Grade = Literal["valid", "qualified", "invalid"]
Severity = Literal["qualified", "invalid"]
CacheState = Literal["cold", "not shown cold", "unknown", "not asked"]
Status = Literal["ok", "failed", "interrupted"]


class Percentiles(TypedDict):
    """Of a set of durations in seconds, linearly interpolated; all null for an empty set."""

    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None


class Throughput(TypedDict):
    """tf_cnn_benchmarks' figures; see `throughput.py` for each definition."""

    total: float | None
    """Samples trained in the common interval / its length. The headline."""
    mean: float | None
    stderr: float | None
    jitter: float | None
    n: int
    """Global steps behind mean, stderr and jitter."""
    per_rank: list[float | None]
    """In rank order; they add up to `total`."""


class StepShares(TypedDict):
    """Parts of the summed step time, 0 to 1. `other` is what the spans leave over."""

    data_wait: float
    copy: float
    compute: float
    """Forward and backward, and what is exchanged meanwhile."""
    exchange: float
    """Of gradients, once the rank's own are all ready: what nothing hides. Waiting for slower ranks is in it."""
    optimizer: float
    other: float


class RankResult(TypedDict):
    rank: int
    node: str
    pid: int | None
    endpoint: str
    status: str
    """Of its run_end; `killed` where there is none."""
    images_per_s: float | None
    steps: int
    """Measured ones."""
    warmup_steps: int
    samples: int
    """Trained in measured steps."""
    step_s: Percentiles
    data_wait_s: float
    data_wait_fraction: float | None
    shares: StepShares | None
    requests: int
    received_bytes: int
    errors: int
    retries: int
    decoded_images: int | None
    trained_images: int | None
    bad_images: int | None
    clock_offset_s: float | None
    clock_uncertainty_s: float | None


class Latency(TypedDict):
    first_byte: Percentiles
    total: Percentiles


class EndpointResult(TypedDict):
    url: str
    requests: int
    data_requests: int
    bytes: int
    """Bodies received, data and metadata, failed tries included."""
    data_bytes: int
    errors: int
    """Requests that failed, probes apart."""
    retries: int
    """Requests that repeat one that failed, here or elsewhere."""
    busy: int
    """Of the errors: answers 503 or 429, by which a store asks for less."""
    rereads: int
    """Ranges asked for once more here, as what had come was damaged."""
    corrupt: int
    """Damaged records of which this endpoint sent bytes."""
    set_aside: int
    """Times that a rank stopped asking it, over all ranks."""
    returned: int
    probes: int
    """Requests for one byte, by which ranks look whether it is well again; part of `requests`."""
    latency_s: Latency
    """Of data requests that ended well."""
    gateway_bytes: int | None
    """What the endpoint says it sent between the first and the last rank; null without that witness."""


class StageResult(TypedDict):
    """One stage of the input, over all ranks. The three shares add up to 1."""

    stage: str
    """`fetch`, `split`, `shuffle`, `decode`, `batch`, from the loaders' own counts; `copy`, from the steps. Split,
    shuffle and batch share a thread, and what blocks it is told of all three."""
    busy: float | None
    """Of its threads' time: at work. Null for a stage that took no time."""
    blocked_on_input: float | None
    """Waiting for what comes before. High: this stage is not what holds the run back."""
    blocked_on_output: float | None
    """Waiting for what comes after."""
    busy_s: float
    """Summed over threads and ranks."""
    threads: int
    """Over all ranks."""
    items: int
    bytes: int
    queue_fill: float | None
    """Finished items in the queue behind the stage when one was taken / its capacity, mean; null without a queue."""


class ReadingResult(TypedDict):
    """How the ranks read, the extremes over them: [lowest, highest]."""

    request_bytes: list[int]
    """Largest GET."""
    read_ahead: list[int]
    """GETs in flight or waiting."""
    lanes: list[int]
    """Of the reading plan, per rank."""
    tuned: list[str]
    """What the recipe left open."""


class BadRecordResult(TypedDict):
    """A record that gave no sample."""

    shard: str
    offset: int
    """Of its frame's first byte in the shard."""
    reason: str


class InputResult(TypedDict):
    """Sums over ranks of the loaders' own counts; null where a rank wrote none."""

    source: str
    """As in the recipe. `memory`: what was received came from memory, but for each rank's first range."""
    planned_bytes: int | None
    received_bytes: int | None
    trained_bytes: int | None
    discarded_bytes: int | None
    inflated_bytes: int | None
    """What decompressing added to the received bytes: 0 for shards that are not compressed."""
    decoded_images: int | None
    trained_images: int | None
    bad_images: int | None
    """Records met that gave no sample, each time; those decoded ahead and never trained included."""
    replaced_images: int | None
    """Among `trained_images`: others trained a second time in their batch, in the place of such records."""
    bad_records: list[BadRecordResult]
    """Of the ranks' reports, each record once, in order of shard and offset; at most 100."""
    fallback_images: int | None
    """Left to the CPU by a GPU that was to decode them; among `decoded_images`."""
    padded_images: int | None
    """Trained a second time in their epoch to fill its last batch; among `trained_images`."""
    epochs: float | None
    """Passes over the training set of the rank that read most."""
    eval_bytes: int
    """Received of validation shards, failed tries included; part of none of the above."""
    reread_share: float | None
    """Of the data bytes that arrived: those of ranges that some rank of this run had fetched before. 0 to 1."""
    first_batch_s: float | None
    """From making the loader to its first batch, on the slowest rank."""
    reading: ReadingResult | None
    stages: list[StageResult]
    """In the order of an image's way; empty where no rank wrote any."""


class DataSetResult(TypedDict):
    url: str
    shards: int
    bytes: int
    records: int | None
    manifest: bool
    missing_shards: int
    """By the numbers in the others' names; such a set is not the whole one."""
    ignored_shards: int
    """There, but not in the manifest: not read."""


class HostCache(TypedDict):
    """What was done on one host before the first read."""

    node: str
    method: str
    resident_fraction: float | None
    note: str


class StorageFlushResult(TypedDict):
    """The recipe's `cache.storage_flush_command`. That it ended well proves nothing."""

    command: list[str]
    exit_code: int | None
    duration_s: float


class CacheResult(TypedDict):
    wanted: str
    state: CacheState
    method: str
    resident_fraction: float | None
    gateway_bytes: int | None
    disk_read_bytes: int | None
    disk_share: float | None
    """Bytes the store's volume processes read from disk / bytes its gateways sent."""
    note: str
    hosts: list[HostCache]
    """`method` and `note` sum them up; `resident_fraction` is the largest, null where one is not known."""
    storage_flush: StorageFlushResult | None


class SummariesResult(TypedDict):
    """TensorBoard's event files, which rank 0 wrote between steps."""

    written: int
    """Times."""
    write_s: float
    """In all. No step of rank 0 holds it; other ranks wait for it in the exchange of their next step."""


class HostResult(TypedDict):
    """Over the common interval, or over all samples where there is none."""

    node: str
    num_cpus: int
    seconds: float
    cpu_busy: float | None
    cpu_iowait: float | None
    cpu_steal: float | None
    disk_read_mb_per_s: float | None
    disk_write_mb_per_s: float | None
    nic_received_mb_per_s: dict[str, float]
    nic_sent_mb_per_s: dict[str, float]
    peak_rank_rss_bytes: dict[str, int]
    gpus: list[dict[str, float]]
    """Mean of each counter."""


class CheckpointsResult(TypedDict):
    """Written in this run, by rank 0 for all. Training goes on meanwhile, so the rate is what is left beside it."""

    written: int
    last_step: int
    """Steps done when its state was taken."""
    last_target: str
    bytes: int
    """Of all of them."""
    write_s: float
    """From the end of each copy to the whole checkpoint, digests and sync to disk included; summed."""
    mb_per_s: float | None
    pause_s: Percentiles
    """How long all ranks stood still for one. These pauses are part of the interval that `images_per_s` is taken over,
    where they lie in it."""
    waited_s: float
    """Of the pauses, what was waiting for the write before; summed."""
    copy_s: float
    """Of the pauses, what was the copy to host memory; summed."""


class ResumedResult(TypedDict):
    """The checkpoint that training went on from. Nothing of what was before it is in any other figure."""

    step: int
    """Steps done before this run."""
    source: str
    bytes: int
    ranks: int
    """Each of them read all of it."""
    read_s: float
    """Of the slowest rank, digests included."""
    mb_per_s: float | None
    """Of the slowest rank."""
    load_s: float
    """Into model and optimizer, of the slowest rank."""
    differences: list[str]
    """Why losses may not be those of a training that was not interrupted; empty: they are."""


class WeightsResult(TypedDict):
    """What the model began with, where that was a file of the user's."""

    source: str
    bytes: int
    read_s: float
    loaded: int
    """Tensors."""
    head: list[str]
    """Of the classifier, left random."""
    missing: list[str]
    """Buffers that the file did not have."""
    unexpected: list[str]
    """In the file alone; not used."""


class Reason(TypedDict):
    rule: str
    expected: str
    actual: str
    severity: Severity


class Validity(TypedDict):
    grade: Grade
    reasons: list[Reason]


class Verdict(TypedDict):
    stage: str
    reason: str
    data_wait_fraction: float | None
    worst_rank: int | None
    worst_rank_data_wait_fraction: float | None


class EvaluationResult(TypedDict):
    """One evaluation, by all ranks. Times in seconds since the clock of time to quality was started."""

    step: int
    """Steps of training before it."""
    epoch: int
    epochs: float | None
    """Passes over the training set before it; null where its records are not known."""
    start_s: float
    """On the last rank that began: until then one was still training."""
    end_s: float
    """On the last rank that ended."""
    known_s: float
    """On the first rank that knew the metrics."""
    images: int
    """Evaluated by all ranks."""
    images_per_s: float
    data_wait_fraction: float
    """Of the evaluation's time; mean over ranks."""
    metrics: dict[str, float]
    met: bool
    """Meets the target."""


class QualityResult(TypedDict):
    """Time to quality, and what it is made of: (samples / train_images_per_s) + evaluation_s + other_s. Up to the
    evaluation that met the target, or to the end of the run where none did."""

    target: dict[str, float]
    """Empty: the run had none."""
    reached: bool | None
    """Null without a target."""
    time_to_quality_s: float | None
    """Null where the target was not met."""
    time_s: float
    """On the clock, whether the target was met or not."""
    on_clock: bool
    """Whether evaluations are part of the two."""
    init_s: float | None
    """Of the slowest rank, from its process' start to the clock's: libraries, process group, model."""
    init_counted_s: float
    """What of it the rules allow no more (beyond 20 minutes), which is part of the time."""
    seed: int
    steps: int
    """Warm-up included."""
    epochs: float | None
    limit_epochs: float
    """0: none but the length of the training."""
    samples: int
    train_s: float
    """From the clock's start through all steps, evaluations left out."""
    train_images_per_s: float | None
    """Warm-up included."""
    evaluation_s: float
    evaluation_share: float
    """Of training and evaluations together, 0 to 1, on the clock or off it."""
    other_s: float
    evaluations: list[EvaluationResult]


class Failure(TypedDict):
    """The first cause of a run that did not end ok."""

    type: str
    message: str
    hint: str
    rank: int | None
    """Null: the launcher."""
    node: str
    phase: str
    exit_code: int


class ModelResult(TypedDict):
    """From the ranks' journals."""

    name: str
    parameters: int
    gradient_bytes: int
    """That each rank hands to the exchange in a step; 0: nothing is exchanged."""
    emulated_step_s: float | None
    """Null: the model was really trained. Otherwise nothing was: each step took at least this long, by the recipe."""
    skipped_updates: int
    """Steps of rank 0 whose update was left out as gradients overflowed (fp16), warm-up included."""
    compiled_s: float | None
    """Null without `model.compile`: the longest step in which a graph was compiled, over all ranks."""


class Result(TypedDict):
    schema: int
    name: str
    status: Status
    error: Failure | None
    images_per_s: Throughput
    interval_s: float | None
    """In which all ranks measured, pauses for evaluations left out."""
    step_s: Percentiles
    world_size: int
    steps: int
    """Measured global steps: those that every rank finished."""
    warmup_steps: int
    samples: int
    """Trained by all ranks in measured steps."""
    read_bytes: int
    """Bodies received from the store: metadata, failed tries and a checkpoint to go on from included."""
    decoded_images: int | None
    epochs: float | None
    data_wait_fraction: float | None
    worst_rank: int | None
    worst_rank_data_wait_fraction: float | None
    au: float | None
    model: ModelResult | None
    """None where no rank came to build it."""
    input: InputResult
    endpoints: list[EndpointResult]
    ranks: list[RankResult]
    hosts: list[HostResult]
    data_set: DataSetResult | None
    """None with a constant batch."""
    cache: CacheResult
    checkpoints: CheckpointsResult | None
    """Null where none was written."""
    resumed: ResumedResult | None
    """Null for a training that began with this run."""
    weights: WeightsResult | None
    """Null where all weights were random, or a checkpoint's."""
    summaries: SummariesResult | None
    """Null where none were written."""
    quality: QualityResult | None
    """None for a run without evaluations."""
    validity: Validity
    verdict: Verdict
    started_unix_s: float | None
    recipe_sha256: str
    dataset_sha256: str
    environment: dict[str, Any]
    """Node name to what its lowest rank recorded."""
