"""How a command ends."""

import os
import subprocess
import sys


def test_a_second_signal_ends_a_command_at_once() -> None:
    program = """if True:
        import asyncio
        from contextlib import suppress
        from esp_pubsub.cli.running import run

        async def job():
            print("begun", flush=True)
            try:
                await asyncio.sleep(3600)
            finally:
                print("ends", flush=True)
                while True:
                    with suppress(asyncio.CancelledError):
                        await asyncio.sleep(3600)

        run(job)
    """
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            for word in ("begun\n", "ends\n"):
                assert running.stdout.readline() == word
                os.kill(running.pid, 2)
            assert running.wait(10) == -2
        finally:
            running.kill()
