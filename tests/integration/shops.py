"""An engine that has orders paid outside, as the tests of effects run it. Also a process that pays:
`python -m tests.integration.shops DIRECTORY FILE` notes the key of each call in the file.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from dataclasses import dataclass, field
from pathlib import Path

import esp_pubsub as esp

URL = "dfESP://local:5555/shop/orders"
ORDER = "id*:int64,amount:int64"
CALL, OUTCOME = "order*:int64,amount:int64", "call*:string,paid:int32"
ANSWER, PAID = "command*:string,id:int64,waiting:int64", "id*:int64,times:int64"


@esp.model(
    inputs={"Orders": ORDER, "Outcomes": OUTCOME},
    outputs={"Calls": CALL, "Answers": ANSWER, "Paid": PAID},
    version="1",
)
@dataclass
class Shop:
    """Orders are paid outside; each is paid once, as far as the shop can tell."""

    calls: esp.Outcomes = field(default_factory=esp.Outcomes)
    times: dict[str, int] = field(default_factory=dict)

    def step(self, window: str, block: esp.Block, out: esp.Out) -> None:
        if window == "Outcomes":
            for order, _ in self.calls.take(block):
                self.times[order] = self.times.get(order, 0) + 1
                out.emit("Paid", [(int(order), self.times[order])])
            return
        out.emit("Calls", block.rows())
        for row, (order, _) in enumerate(block.rows()):
            self.calls.expect(out.key("Calls", row), str(order))
            out.emit("Answers", [(block.key(row), order, len(self.calls.waiting))])

    def ask(self, order: int) -> int:
        return self.times.get(str(order), 0)


async def pay(directory: str, file: Path) -> None:
    """Pay until killed."""

    async def handle(call: esp.Call) -> tuple[str, int]:
        with file.open("a") as handled:
            handled.write(f"{call.key}\n")
        await asyncio.sleep(0.002)
        return (call.key, 1)

    async with esp.init(dir=directory) as client:
        await esp.effect(client, f"{URL}/Calls", f"{URL}/Outcomes", handle, concurrency=4)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(pay(sys.argv[1], Path(sys.argv[2])))
