"""Compute dtype and the reason for its choice, without torch, so that light commands can import it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeChoice:
    """A compute dtype and the reason for the choice.

    Example:
        ComputeChoice(dtype="float32", reason="measured", fastest="float32", float32_gflops=31.0, bfloat16_gflops=3.1)
    """

    dtype: str  # float32 or bfloat16
    reason: str  # for people
    fastest: str = ""  # here; empty: there was nothing to choose
    float32_gflops: float = 0.0  # of the model's products here; 0: not measured
    bfloat16_gflops: float = 0.0  # likewise

    @property
    def is_slow(self) -> bool:
        """True for bfloat16 where float32 is faster; the reverse costs little."""
        return self.dtype == "bfloat16" and self.fastest == "float32"

    @property
    def advice(self) -> str:
        """One sentence of advice if the dtype is slow; else empty."""
        if not self.is_slow:
            return ""
        factor = self.float32_gflops / max(self.bfloat16_gflops, 1e-9)
        return (
            f'bfloat16 is {factor:.1f} times slower here than float32: set compute_dtype = "float32"; published '
            "versions stay the same"
        )

    @property
    def words(self) -> str:
        """Dtype, reason and measured speeds as text for people, in one line."""
        speeds = f": {self.float32_gflops:.1f} GFLOP/s in float32, {self.bfloat16_gflops:.1f} in bfloat16"
        return f"{self.dtype} ({self.reason}{speeds if self.float32_gflops else ''})"
