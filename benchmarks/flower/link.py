"""A slow link on loopback: it passes bytes on at a given rate and counts them.

One stands between each SuperNode and the SuperLink where bytes are counted, and where the kernel's
links (veth.py) are not allowed. What it counts is what crosses the socket: TLS records and all.
"""

from __future__ import annotations

import asyncio
import threading
import time

HOST = "127.0.0.1"
CHUNK = 8192


class Link:
    """Listens on a port of its own and passes on to another, each way at ``rate`` bits a second."""

    kind = "proxies on loopback"
    host = HOST
    within: tuple[str, ...] = ()

    def __init__(self, target: int, rate: float | None = None) -> None:
        self.target, self.rate = target, rate
        self.up = self.down = 0
        self.free_at = {"up": 0.0, "down": 0.0}
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        listening = asyncio.run_coroutine_threadsafe(self._listen(), self.loop)
        self.port: int = listening.result(10)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()

    async def _end(self) -> None:
        self.server.close()
        passing = asyncio.all_tasks() - {asyncio.current_task()}
        for task in passing:
            task.cancel()
        await asyncio.gather(*passing, return_exceptions=True)

    async def _listen(self) -> int:
        self.server = await asyncio.start_server(self._serve, HOST, 0, limit=CHUNK)
        return int(self.server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(HOST, self.target, limit=CHUNK)
        await asyncio.gather(
            self._pass(reader, far_writer, "up"), self._pass(far_reader, writer, "down")
        )

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str
    ) -> None:
        try:
            while data := await reader.read(CHUNK):
                setattr(self, way, getattr(self, way) + len(data))
                await self._take_time(way, len(data))
                writer.write(data)
                await writer.drain()
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _take_time(self, way: str, count: int) -> None:
        """All connections of a node share its link: wait for one's turn, then for the bytes."""
        if self.rate is None:
            return
        now = time.monotonic()
        self.free_at[way] = max(now, self.free_at[way]) + 8 * count / self.rate
        await asyncio.sleep(self.free_at[way] - now)
