"""Data-parallel step over several processes: torch's FSDP2 over gloo (CPU) or NCCL (GPUs), under `torchrun`.

Each rank holds a shard of the float32 masters, gradients and moments, runs its share of the micro-batches, and gathers
the scores of the rest: coefficients, loss and clipping are those of the one big step.

Invariant: outside `run` every parameter is sharded, so that nothing reads weights older than the last optimizer step.
"""

import os
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import MethodType
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from swarm.activity import OnProgress, ignore_progress
from swarm.errors import ConfigError
from swarm.learn.optimizer import MasterAdamW

Result = TypeVar("Result")

IDLE_LIMIT = timedelta(days=365)  # ranks wait for the next command however long rollouts take
_PASS = "run_pass"


class ShardedRanks:
    """Implements `Ranks` over a process group, from the environment that `torchrun` sets up.

    Example:
        torchrun --standalone --nproc-per-node 2 my_program.py  # which calls ShardedRanks.start()
    """

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        self.on_progress: OnProgress = ignore_progress
        self._mesh = mesh
        self._device = device
        self._lock = threading.Lock()
        self._is_out_of_step = False
        self._command_group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=IDLE_LIMIT))

    @classmethod
    def start(cls, store: str | None = None) -> "ShardedRanks":
        """Joins the other ranks: each takes one GPU if torch can use GPUs, else the CPU.

        Args:
            store: a file through which ranks of one machine meet; None: over TCP, at the address in the environment.

        Raises:
            ConfigError: fewer GPUs than processes of this machine, or torch is too old to sum gradients.
        """
        if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
            raise ConfigError(f"learner.num_processes: torch {torch.__version__} cannot do this; install a newer one")
        local_rank, local_count = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        if kind == "cuda" and torch.cuda.device_count() < local_count:
            raise ConfigError(
                f"learner.num_processes: {local_count} processes need as many GPUs, "
                f"there are {torch.cuda.device_count()}; lower it, or hide all with CUDA_VISIBLE_DEVICES="
            )
        device = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
        if kind == "cuda":
            torch.cuda.set_device(device)
        if local_count == int(os.environ["WORLD_SIZE"]):  # one machine: nothing listens on the network
            for backend in ("GLOO", "NCCL"):
                os.environ[f"{backend}_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
        dist.init_process_group(
            "nccl" if kind == "cuda" else "gloo",
            init_method=f"file://{store}" if store else None,
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
        )
        return cls(init_device_mesh(kind, (dist.get_world_size(),)), device)

    def stop(self) -> None:
        """Leaves the process group, unless the ranks are out of step: then leaving could block for ever."""
        if not self._is_out_of_step:
            dist.destroy_process_group()

    @property
    def index(self) -> int:
        """Number of this rank; 0 leads."""
        return self._mesh.get_rank()

    @property
    def count(self) -> int:
        """Number of ranks."""
        return self._mesh.size()

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self._device

    # --- weights -------------------------------------------------------------------------------------

    def prepare(self, network: nn.Module) -> None:
        """Shards a network in place, layer by layer, and holds its trained parameters in float32 at least.

        Raises:
            ConfigError: the network's parameters are of several dtypes.
        """
        dtypes = {param.dtype for param in network.parameters()}
        if len(dtypes) > 1:
            raise ConfigError(f"model: parameters of several dtypes {sorted(map(str, dtypes))} cannot be sharded")
        (dtype,) = dtypes
        wide = torch.promote_types(dtype, torch.float32)
        policy = MixedPrecisionPolicy() if dtype == wide else MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=wide)
        layers: Sequence[str] = list(getattr(network, "_no_split_modules", None) or ())
        blocks = [module for module in network.modules() if type(module).__name__ in layers]
        for module in (*blocks, network):
            for param in module.parameters():
                if param.requires_grad and not isinstance(param, DTensor):
                    param.data = param.data.to(wide)
            # Resharded after each forward pass, the root too: see the invariant.
            sharded = fully_shard(module, mesh=self._mesh, reshard_after_forward=True, mp_policy=policy)
            sharded.set_gradient_divide_factor(1.0)  # ranks add up, as micro-batches do
            sharded.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sums
        setattr(network, _PASS, MethodType(_run_pass, network))
        register_fsdp_forward_method(network, _PASS)

    def optimizer(self, network: nn.Module, betas: tuple[float, float], weight_decay: float) -> MasterAdamW:
        """An optimizer that steps this rank's shards."""
        return ShardedAdamW(network, betas, weight_decay, self)

    def run(self, network: nn.Module, work: Callable[[], Result]) -> Result:
        """Runs a pass that gathers each layer's weights when it reaches the layer, and frees them afterwards."""
        return cast(Result, getattr(network, _PASS)(work))  # no tensors among the arguments: they would be cast

    def gather_whole(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yields whole tensors on the CPU of rank 0, and nothing on other ranks; all ranks must exhaust it."""
        for name, tensor in tensors.items():
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if self.index == 0:
                yield name, full.cpu()

    def shard(self, whole: Tensor) -> DTensor:
        """This rank's shard of a tensor that every rank has whole."""
        return distribute_tensor(whole.to(self._device), self._mesh, [Shard(0)], src_data_rank=None)

    def reduce_scatter(self, values: Tensor) -> DTensor:
        """This rank's shard of the sum of all ranks' values."""
        return DTensor.from_local(values, self._mesh, [Partial()]).redistribute(placements=[Shard(0)])

    # --- work ----------------------------------------------------------------------------------------

    def assign(self, num_parts: int) -> Sequence[tuple[int, bool]]:
        """Micro-batch p goes to rank p mod count; a rank with none left repeats the last one without effect."""
        mine = range(self.index, num_parts + self.index, self.count)
        return [(index, True) if index < num_parts else (num_parts - 1, False) for index in mine]

    def gather_rows(self, values: Tensor, parts: Sequence[Sequence[int]]) -> Tensor:
        """Takes each row from the rank that computed it: sums rows that are zero on all other ranks."""
        owner = torch.zeros(values.shape[0], dtype=torch.int64)
        for index, members in enumerate(parts):
            owner[list(members)] = index % self.count
        is_mine = (owner == self.index).to(values.device)[:, None]
        mine = torch.where(is_mine, values, torch.zeros_like(values))
        rows = mine.to(torch.uint8) if mine.dtype is torch.bool else mine
        dist.all_reduce(rows)
        return rows.to(values.dtype)

    def all_sum(self, value: float) -> float:
        """Sum over ranks, added in the order of ranks, so that every rank has the same bits."""
        mine = torch.tensor([value], dtype=torch.float64, device=self._device)
        values = [torch.empty_like(mine) for _ in range(self.count)]
        dist.all_gather(values, mine)
        return sum(float(each) for each in values)

    def broadcast(self, values: Tensor) -> Tensor:
        """Rank 0's values, on every rank."""
        given = values.to(self._device, copy=True).contiguous()
        dist.broadcast(given, src=0)
        return given.to(values.device)

    # --- commands ------------------------------------------------------------------------------------

    @contextmanager
    def in_step(self) -> Generator[bool]:
        """Holds rank 0's lock while all ranks execute a command; yields False if the ranks are out of step.

        Ranks are out of step once a command failed on this rank: the other ranks wait in the middle of the command
        until their processes end.
        """
        with self._lock:
            was_out, self._is_out_of_step = self._is_out_of_step, True
            yield not was_out
            self._is_out_of_step = was_out

    def send_command(self, message: bytes) -> None:
        """Sends a command from rank 0 to the others."""
        data = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        dist.broadcast(torch.tensor([data.numel()]), src=0, group=self._command_group)
        dist.broadcast(data, src=0, group=self._command_group)

    def receive_command(self) -> bytes:
        """Waits for rank 0's next command, however long that takes (blocking)."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, src=0, group=self._command_group)
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, src=0, group=self._command_group)
        return data.numpy().tobytes()


class ShardedAdamW(MasterAdamW):
    """`MasterAdamW` whose masters and moments are this rank's shards."""

    def __init__(
        self, network: nn.Module, betas: tuple[float, float], weight_decay: float, ranks: ShardedRanks
    ) -> None:
        super().__init__(network, betas, weight_decay)
        self._network = network
        self._ranks = ranks
        self._unshared: dict[str, Tensor] = {}  # whole gradients of this rank, summed over ranks at the next step

    def gradient(self, param: Tensor) -> Tensor | None:
        """This rank's part of the gradient of a whole parameter, inside a pass; None if the parameter is frozen."""
        for name, own in self._network.named_parameters():
            if own is param and name in self._masters:
                if name not in self._unshared:
                    self._unshared[name] = torch.zeros_like(param, dtype=self._masters[name].dtype)
                return self._unshared[name]
        return None

    def discard(self) -> None:
        """Drops every gradient without a step."""
        super().discard()
        self._unshared.clear()

    def step(self, learning_rate: float, max_grad_norm: float) -> float:
        """`MasterAdamW.step` by all ranks; the norm is the whole gradient's."""
        for name, values in self._unshared.items():
            master, part = self._masters[name], self._ranks.reduce_scatter(values)
            master.grad = part if master.grad is None else master.grad.add_(part)
        self._unshared.clear()
        return super().step(learning_rate, max_grad_norm)

    def state(self) -> dict[str, Tensor]:
        """Whole state, so that a run may resume with another number of ranks; empty on ranks other than 0."""
        return dict(self._ranks.gather_whole(super().state()))

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Loads this rank's shards of a whole state."""
        super().load_state(
            {key: value if value.dim() == 0 else self._ranks.shard(value) for key, value in tensors.items()}
        )

    def _norm(self, gradients: Sequence[Tensor]) -> Tensor:
        return cast(DTensor, super()._norm(gradients)).full_tensor()


def _run_pass(network: nn.Module, work: Callable[[], object]) -> object:
    return work()
