"""Every metric of the project: name, kind, labels, unit, meaning and expected range.

Invariant: `Telemetry` refuses a metric that is not in this list. In logs and curves a name reads
`stage/thing_unit`; in Prometheus the same is `swarm_stage_thing_unit`. docs/metrics.md is generated from
here (`make docs`).
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["gauge", "counter", "histogram"]

_AGES = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One figure that a node or coordinator publishes.

    Example:
        Metric(name="learn/age_steps", kind="histogram", unit="steps", meaning="...", expected="0-4", buckets=(0, 1))
    """

    name: str
    kind: Kind
    unit: str
    meaning: str
    expected: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # upper bounds, histograms only

    @property
    def prometheus_name(self) -> str:
        """Name of the metric in Prometheus."""
        return "swarm_" + self.name.replace("/", "_")


def _gauge(name: str, unit: str, meaning: str, expected: str, *labels: str) -> Metric:
    return Metric(name=name, kind="gauge", unit=unit, meaning=meaning, expected=expected, labels=labels)


def _counter(name: str, unit: str, meaning: str, expected: str, *labels: str) -> Metric:
    return Metric(name=name, kind="counter", unit=unit, meaning=meaning, expected=expected, labels=labels)


def _histogram(name: str, unit: str, meaning: str, expected: str, buckets: tuple[float, ...]) -> Metric:
    return Metric(name=name, kind="histogram", unit=unit, meaning=meaning, expected=expected, buckets=buckets)


_LIST = (
    # learn: the optimizer step
    _gauge("learn/step", "steps", "Optimizer steps of the newest policy version", "rises without pause"),
    _counter("learn/skipped_steps_total", "steps", "Steps skipped because something was not finite", "0"),
    _counter("learn/trained_tokens_total", "tokens", "Tokens that gradients came from", "rises"),
    _counter("learn/groups_total", "groups", "Groups consumed, by origin: local (made here), follower (of the own "
             "policy, made by a node that follows it), external (of other policies)", "rises", "origin"),
    _counter("learn/source_groups_total", "groups", "Groups consumed, by producer: what each node brought to this one",
             "rises", "source"),
    _counter("learn/zero_variance_groups_total", "groups", "Local groups of equal rewards used up", "under 70 %"),
    _histogram("learn/age_steps", "steps", "Age of each group at consumption, from its oldest token", "0-4", _AGES),
    _histogram("learn/age_in_flight_steps", "steps", "The part of the age that passed while a group was generated: its "
               "newest token's version minus its oldest token's", "0; more with follow.in_flight", _AGES),
    _histogram("learn/age_in_queue_steps", "steps", "The rest of the age: from a group's newest token to its use",
               "0-4", _AGES),
    _histogram("learn/reuse", "uses", "Which use of a group this was: 1 is the first", "1", (1.0, 2.0, 4.0, 8.0)),
    _histogram("learn/draw_wait_s", "s", "How long a step waited for its groups", "under one step", _SECONDS),
    _counter("learn/seconds_total", "s", "Time of the worker by phase", "backward leads", "phase"),
    _gauge("learn/overlap_share", "share", "Of the time of the shorter of generation and learning, spent in both",
           "0.5-1; 0 with deterministic"),
    _gauge("learn/loss", "1", "Loss of the newest step; its sign and size mean little in RL", "finite"),
    _gauge("learn/learning_rate", "1", "Learning rate of the newest step", "as `learner.schedule` says"),
    _gauge("learn/grad_norm", "1", "Gradient norm before clipping", "0.01-10; spikes come before collapse"),
    _gauge("learn/reward_mean", "reward", "Mean reward of what the newest step learned from", "rises"),
    _gauge("learn/entropy_nats", "nats/token", "Mean entropy of the policy on the trained tokens", "falls slowly"),
    _gauge("learn/clip_share", "share", "Trained tokens that the weight rule clipped or capped", "0-0.2"),
    _gauge("learn/clip_share_positive", "share", "The same over tokens with a positive advantage", "0-0.2"),
    _gauge("learn/clip_share_negative", "share", "The same over tokens with a negative advantage", "0-0.2"),
    _gauge("learn/masked_share", "share", "Trained tokens that a correction left out", "0-0.1"),
    _gauge("learn/truncated_share", "share", "Trained tokens that a correction scaled down", "0-0.3"),
    _gauge("learn/advantage_mean", "1", "Mean advantage of the trained tokens", "near 0"),
    _gauge("learn/advantage_std", "1", "Standard deviation of the advantages", "0.3-2"),
    _gauge("learn/advantage_max", "1", "Greatest size of an advantage", "under 10"),
    _gauge("learn/zero_variance_share", "share", "Drawn groups whose rewards are all equal", "0"),
    _gauge("learn/dropped_share", "share", "Drawn rollouts that trained no token (external ones below the mean)",
           "0-0.3"),
    _gauge("learn/padding_share", "share", "Positions of the forward passes that were padding", "under 0.1"),
    _gauge("learn/response_tokens_mean", "tokens", "Mean tokens of a response (what the model chose) in the newest "
           "step", "well under generator.max_new_tokens"),
    _gauge("learn/cut_off_share", "share", "Responses of the newest step that the token limit ended", "under 0.1"),
    _gauge("learn/num_micro_batches", "passes", "Forward passes that the newest step was cut into", "1-16"),
    _gauge("learn/age_mean_steps", "steps", "Mean age of what the newest step learned from", "0-4"),
    _gauge("learn/age_in_flight_mean_steps", "steps", "The part of that mean which passed during generation",
           "0; more with follow.in_flight"),
    _gauge("learn/age_max_steps", "steps", "Greatest age in the newest step", "at most replay.max_age_steps"),
    _gauge("learn/mismatch_kl_k1", "nats/token", "Mean of -log r of policy over generator", "-0.05 to 0.05"),
    _gauge("learn/mismatch_kl_k3", "nats/token", "Mean of r - 1 - log r: an estimate that is never negative",
           "under 0.05; from 0.5 on the data says little"),
    _gauge("learn/log_ratio_mean", "nats", "Mean log-ratio of policy over generator", "near 0"),
    _gauge("learn/log_ratio_std", "nats", "Standard deviation of the log-ratio", "under 0.3"),
    _gauge("learn/log_ratio_m2", "nats^2", "Second moment of the log-ratio: what the guard and M2PO bound",
           "under 0.12; the guard acts from 0.25"),
    _gauge("learn/log_ratio_p01", "nats", "Log-ratio that 1 % of the tokens are below", "over -1"),
    _gauge("learn/log_ratio_p99", "nats", "Log-ratio that 1 % of the tokens are above", "under 1"),
    _gauge("learn/age_ess_share", "share", "Effective sample size by age; `age` is the first of a range", "over 0.5",
           "age"),
    _gauge("learn/age_mismatch_kl", "nats/token", "Distance from the generator by age (k3)", "under 0.1", "age"),
    _gauge("learn/age_log_ratio_m2", "nats^2", "Second moment of the log-ratio by age", "under 0.25", "age"),
    _gauge("learn/guard_level", "level", "The learner's guard: 0 open, 1 capped, 2 safe recipe, 3 frozen", "0"),
    _gauge("learn/guard_max_age_steps", "steps", "Age bound that the learner's guard allows",
           "replay.max_age_steps"),
    _gauge("learn/guard_held_sources", "nodes", "Sources that the learner's guard has set aside", "0"),
    _gauge("learn/guard_groups_left_out", "groups", "Groups of the newest draw that the guard left out", "0"),
    _gauge("learn/guard_idle_draws", "draws", "Draws in a row whose groups were all of sources set aside", "0"),
    _gauge("learn/guard_groups_spared", "groups", "Groups of the newest draw that were used although every source is "
           "set aside", "0"),
    _gauge("learn/guard_others_held", "1", "1 while groups of other nodes, the newest sources first, are set aside "
           "because held-out accuracy fell by 3 sigma", "0"),
    _gauge("learn/mass_clipped_groups", "groups", "Groups of other nodes in the newest step that weighed more than "
           "their share, and were scaled down to it", "0; a few of a hundred steps"),
    _gauge("learn/mass_others_share", "share", "Other nodes' part of the newest step: of the sum of |coefficient| of "
           "its tokens", "up to J / (I + J)"),
    _gauge("learn/ratio_mean", "1", "Mean importance ratio of policy over generator", "near 1"),
    _gauge("learn/ratio_max", "1", "Greatest importance ratio", "under 100"),
    _gauge("learn/ess_share", "share", "Effective sample size over sample size, by token", "over 0.5"),
    _gauge("learn/ess_share_local", "share", "The same over rollouts of the own policy", "over 0.9"),
    _gauge("learn/ess_share_external", "share", "The same over rollouts of other policies", "over 0.3"),
    _gauge("learn/source_ess_share", "share", "Effective sample size of one source for this learner", "over 0.3",
           "source"),
    _gauge("learn/source_mismatch_kl", "nats/token", "Distance of one source from this learner (k3)", "under 0.5",
           "source"),
    _gauge("learn/source_age_steps", "steps", "Mean age of one source's groups at consumption", "0-4", "source"),
    # rollout: generation
    _counter("rollout/groups_total", "groups", "Groups generated, scored and stored here, by environment", "rises",
             "env"),
    _counter("rollout/tokens_total", "tokens", "Response tokens generated here", "rises"),
    _gauge("rollout/tokens_per_s", "tokens/s", "Generated here, smoothed over about 30 s", "steady"),
    _counter("rollout/responses_total", "responses", "Responses generated here, by how they ended: stop, length "
             "(cut off), aborted", "length: under a tenth", "env", "finish"),
    _gauge("rollout/response_tokens_mean", "tokens", "Mean tokens of a response in the newest group, what an "
           "environment said in between included", "well under generator.max_new_tokens", "env"),
    _gauge("rollout/reward_mean", "reward", "Mean reward of the newest group, by environment", "rises", "env"),
    _gauge("rollout/reward_part_mean", "reward", "The same of each named reward", "by its meaning", "env", "reward"),
    # exchange: other nodes
    _counter("exchange/admitted_total", "groups", "Groups of other nodes that passed admission", "rises"),
    _counter("exchange/refused_total", "groups", "Groups of others refused, by reason", "few; duplicate is harmless",
             "reason"),
    _counter("exchange/source_admitted_total", "groups", "Groups admitted, by producer", "rises", "source"),
    _gauge("exchange/source_free_text_share", "share", "Characters of a source's newest better answers beside the "
           "calls, code or readable turns that are paid: free text that the policy is taught", "as of own groups",
           "source"),
    _counter("exchange/source_refused_total", "groups", "Groups refused, by producer (by sender, where no signature "
             "says whose they are)", "few", "source"),
    _histogram("exchange/arrival_s", "s", "From creation at the producer to admission here (includes clock skew)",
               "under 1", _SECONDS),
    _counter("exchange/received_bytes_total", "bytes", "Sealed groups from peers, useful or not", "rises"),
    _counter("exchange/sent_bytes_total", "bytes", "Sealed groups to peers", "rises"),
    _gauge("exchange/peers", "peers", "Peers whose groups are streamed now", "1 to exchange.max_neighbours"),
    _gauge("exchange/known_peers", "peers", "Peers that proved their key at an address, now or before", "rises to 512"),
    _counter("exchange/dials_total", "dials", "Dials of peers by result: answered or failed; adverts of dead addresses "
             "show as failed ones", "failed: under 1 a second", "result"),
    _gauge("replay/groups", "groups", "Groups in the replay buffer", "under replay.max_groups"),
    _gauge("replay/bytes", "bytes", "Bytes of memory that the replay buffer holds", "under replay.max_bytes"),
    # evaluation
    _gauge("evaluation/accuracy", "share", "Accuracy, greedy or of sampled tries", "rises", "env", "split"),
    # node: the process itself
    _gauge("node/last_step_timestamp_s", "s since 1970", "When the newest step ended", "less than minutes ago"),
    _gauge("node/coordinator_reachable", "0 or 1", "1 when the last heartbeat was answered", "1; works with 0"),
    _counter("node/restarts_total", "restarts", "Child processes started again (worker, p2pd, sandbox)",
             "0; sandbox: one for each 20 CPU seconds that scoring took, and each answer that was ended", "process"),
    _counter("node/failures_total", "failures", "Unexpected exceptions that ended a loop", "0", "loop"),
    _gauge("node/relays", "relays", "Relays through which others reach this node",
           "2 where it cannot be dialled, else 0"),
    _gauge("node/relayed_nodes", "nodes", "Nodes that others reach through this one",
           "under exchange.relay_reservations"),
    _counter("node/relayed_bytes_total", "bytes", "Passed on for them, both directions",
             "at most exchange.relay_bytes_per_s"),
    _gauge("node/advice", "0, 1 or 2", "What the coordinator advises: 0 ok, 1 tightened, 2 alarm", "0"),
    # disk
    _counter("disk/written_bytes_total", "bytes", "Written to the disk by the node and all its processes since it "
             "started, as the kernel counts them (Linux)", "checkpoints: 2 MB/s on average"),
    # weights: between a trainer and those who follow it
    _gauge("weights/published_step", "steps", "Newest version of this trainer that others can follow",
           "learn/step, or the one before"),
    _gauge("weights/followers", "nodes", "Nodes with credit of this trainer to generate groups", "steady"),
    _gauge("weights/served_step", "steps", "Version of the followed trainer that the engine serves", "rises"),
    _gauge("weights/behind_steps", "steps", "Newest version known, less the one served", "0-2"),
    _gauge("weights/credit_groups", "groups", "Groups that may be begun now; 0 for long while the trainer is away",
           "at most 2 generator.groups_per_batch"),
    _counter("weights/applied_total", "versions", "Versions that the engine took", "rises"),
    _counter("weights/apply_failed_total", "versions", "Attempts after which the engine served its old version on",
             "0"),
    _counter("weights/applied_bytes_total", "bytes", "Manifests and payloads of the versions taken", "rises"),
    _histogram("weights/stage_s", "s", "From the chunks on the disk to verified weights, generation going on",
               "seconds", _SECONDS),
    _histogram("weights/pause_s", "s", "How long generation stood still for a version", "under 1", _SECONDS),
    _counter("weights/fetched_bytes_total", "bytes", "Chunks of weights from the trainer and other sources", "rises"),
    _counter("weights/sent_bytes_total", "bytes", "Chunks of weights to others", "rises"),
    # coordinator
    _gauge("coordinator/live_nodes", "nodes", "Nodes with a lease", "steady"),
    _counter("coordinator/heartbeats_total", "heartbeats", "Heartbeats answered", "rises"),
    _counter("coordinator/versions_total", "versions", "Policy versions recorded", "rises"),
    _counter("coordinator/refused_versions_total", "versions", "Versions that would fork or go back", "0"),
    _gauge("coordinator/relayed_nodes", "nodes", "Nodes that others reach through the coordinator",
           "0 where nodes relay"),
    _counter("coordinator/relayed_bytes_total", "bytes", "Passed on for them, both directions",
             "at most relay_bytes_per_s"),
    _gauge("coordinator/edge_ess_share", "share", "Median effective sample size of one source over its learners",
           "over 0.3", "source"),
)  # fmt: skip

METRICS: dict[str, Metric] = {metric.name: metric for metric in _LIST}


def markdown() -> str:
    """Renders the list of metrics as the Markdown page docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Generated by `make docs` from `swarm/telemetry/metrics.py`. A node answers on `/metrics` when",
        "`telemetry.metrics_listen` is set, the coordinator on its `http_listen`. TensorBoard and Weights & Biases",
        "show the figures of each step under the same names, those by source as `learn/source_.../SOURCE`, and",
        "accuracies as `evaluation/ENVIRONMENT/SPLIT`.",
    ]
    for stage in dict.fromkeys(metric.name.split("/")[0] for metric in _LIST):
        lines += ["", f"## {stage}", "", "| name | Prometheus | kind | unit | meaning | expected |"]
        lines.append("|---|---|---|---|---|---|")
        lines += [_row(metric) for metric in _LIST if metric.name.startswith(stage + "/")]
    return "\n".join(lines) + "\n"


def _row(metric: Metric) -> str:
    labels = "{" + ",".join(metric.labels) + "}" if metric.labels else ""
    cells = (f"`{metric.name}{labels}`", f"`{metric.prometheus_name}`", metric.kind, metric.unit, metric.meaning)
    return "| " + " | ".join((*cells, metric.expected)) + " |"
