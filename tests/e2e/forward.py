"""Forwards a loopback port into a cluster's network namespace.

    python forward.py PID_IN_THE_NAMESPACE HOST PORT FILE [LOCAL_PORT]

The listening socket is made outside and keeps its namespace; connections are made inside. The
local port is written to the file once it accepts. Standard library only.
"""

import asyncio
import ctypes
import os
import socket
import sys
from pathlib import Path

CLONE_NEWNET = 0x40000000


async def forward(listener: socket.socket, host: str, port: int) -> None:
    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
            writer.write_eof()
        except OSError:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inside = await asyncio.open_connection(host, port)
        except OSError:
            writer.transport.abort()  # the caller sees a reset, as from a host that refuses
            return
        await asyncio.gather(pump(reader, inside[1]), pump(inside[0], writer))
        for end in (writer, inside[1]):
            end.close()

    async with await asyncio.start_server(serve, sock=listener) as server:
        await server.serve_forever()


def enter_network(pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/net") as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def main() -> None:
    pid, host, port, file = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    listener = socket.create_server(("127.0.0.1", int(sys.argv[5]) if len(sys.argv) > 5 else 0))
    enter_network(pid)
    part = file.with_suffix(".part")
    part.write_text(str(listener.getsockname()[1]))
    part.rename(file)
    asyncio.run(forward(listener, host, port))


if __name__ == "__main__":
    main()
