"""What a person sees of a run: one live line on a terminal, plain lines elsewhere."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssmax._extras import require
from ssmax._progress import ProgressLine, clock
from ssmax_lab.model.config import LMConfig

if TYPE_CHECKING:
    import torch

PEAK_TFLOPS = {
    "H200": 989.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "4090": 165.0,
}
"""Dense bfloat16 products a second, by a part of the device's name, as the makers state them."""


def flops_per_token(config: LMConfig) -> float:
    """Of a training step: six for every weight in a product, and causal attention's products."""
    heads = config.num_heads * config.head
    attention = config.hidden_size * (2 * heads + 2 * config.kv_heads * config.head)
    block = attention + 3 * config.hidden_size * config.intermediate_size
    weights = config.num_layers * block + config.hidden_size * config.vocab_size
    visible = (config.train_length + 1) / 2
    return 6.0 * weights + 12.0 * config.num_layers * heads * visible


def peak_flops(device: "torch.device") -> float | None:
    """What the device could do at most, where it is known."""
    if device.type != "cuda":
        return None
    import torch

    name = torch.cuda.get_device_name(device)
    for part, tflops in PEAK_TFLOPS.items():
        if part in name:
            return tflops * 1e12
    return None


class Watch:
    """Shows the first rank's progress; silent on the others and where it is told to be."""

    def __init__(
        self,
        *,
        is_shown: bool = True,
        flops_per_token: float = 0.0,
        peak_flops: float | None = None,
        tensorboard: Path | None = None,
    ) -> None:
        self._line = ProgressLine(is_shown=is_shown)
        self._flops, self._peak = flops_per_token, peak_flops
        self._scale = ""
        self._curves: Any = None
        if tensorboard is not None:
            require("tensorboard", install="ssmax-lab", purpose="run.tensorboard")
            from torch.utils.tensorboard.writer import SummaryWriter

            self._curves = SummaryWriter(str(tensorboard))

    def say(self, text: str) -> None:
        """A line that stays."""
        self._line.say(text)

    def step(
        self,
        *,
        step: int,
        steps: int,
        loss: float,
        rate: float,
        tokens_per_second: float,
        seconds_left: float,
    ) -> None:
        """Where the run is."""
        speed = f"{_short(tokens_per_second)} tokens/s"
        if self._peak:
            speed += f"  {self._flops * tokens_per_second / self._peak:.0%} of peak"
        self._line.show(
            f"step {step:,}/{steps:,}  loss {loss:.4f}  lr {rate:.2e}  {speed}  "
            f"{clock(seconds_left)} left{self._scale}",
            is_last=step == steps,
        )

    def scale(self, *, mean: float, least: float, largest: float) -> None:
        """The s of all heads, for the line."""
        self._scale = f"  s {mean:.3f} ({least:.3f} to {largest:.3f})"

    def validation(self, *, step: int, loss: float) -> None:
        """A look at the validation windows."""
        self.say(f"step {step:,}  validation loss {loss:.4f}")

    def curve(self, kind: str, values: dict[str, Any]) -> None:
        """The numbers of a journal line, for TensorBoard."""
        if self._curves is None:
            return
        step = values["step"]
        for name, value in values.items():
            if name != "step" and isinstance(value, int | float):
                self._curves.add_scalar(f"{kind}/{name}", value, step)
        for name, row in values.get("values", {}).items():
            if ".ssmax." in name:
                for head, value in enumerate(row):
                    self._curves.add_scalar(f"{name}/{head}", value, step)

    def close(self) -> None:
        """Leave the last line standing."""
        self._line.close()
        if self._curves is not None:
            self._curves.close()


def _short(number: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f} {unit}"
    return f"{number:.0f}"
