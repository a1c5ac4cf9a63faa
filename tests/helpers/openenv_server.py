"""A server that follows the WebSocket protocol of OpenEnv."""

import asyncio
import threading
from contextlib import contextmanager

from aiohttp import web


class OpenEnvServer:
    """A server that follows the WebSocket protocol of OpenEnv 0.10. An episode ends after two steps."""

    def __init__(self, capacity: int = 8, fault: str = ""):
        self.capacity, self.fault = capacity, fault
        self.num_open = self.num_refused = 0
        self.received: list[list[dict]] = []

    async def handle(self, request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.num_open == self.capacity:
            self.num_refused += 1
            await socket.send_json({"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "1 of 1 in use"}})
            await socket.close()
            return socket
        self.num_open += 1
        received: list[dict] = []
        self.received.append(received)
        try:
            async for message in socket:
                received.append(message.json())
                if received[-1]["type"] == "close":
                    break
                await self.answer(socket, received)
        finally:
            self.num_open -= 1
            await socket.close()
        return socket

    async def answer(self, socket, received):
        steps = len(received) - 1
        if self.fault and steps:
            if self.fault == "error":
                await socket.send_json({"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "it broke"}})
            elif self.fault == "text":
                await socket.send_str("Hello")
            elif self.fault == "end":
                await socket.close()
            return  # else it hangs
        observation = {"prompt": f"step {steps}"} if steps else {"prompt": "start"}
        data = {"observation": observation, "reward": steps or None, "done": steps == 2, "metadata": {}}
        await socket.send_json({"type": "observation", "data": data})


@contextmanager
def serving(server: OpenEnvServer):
    loop = asyncio.new_event_loop()
    app = web.Application()
    app.router.add_get("/ws", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)

    async def start() -> int:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return site._server.sockets[0].getsockname()[1]

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{asyncio.run_coroutine_threadsafe(start(), loop).result(10)}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
