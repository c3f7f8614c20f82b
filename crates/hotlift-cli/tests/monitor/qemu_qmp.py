"""Drives a migration with qemu.qmp: qemu_qmp.py SOCKET URI"""

import asyncio
import sys

from qemu.qmp import ExecuteError, QMPClient

socket, uri = sys.argv[1:]


async def main():
    qmp = QMPClient("test")
    await asyncio.wait_for(qmp.connect(socket), 60)
    capabilities = [{"capability": name, "state": True} for name in ("multifd", "events")]
    await qmp.execute("migrate-set-capabilities", {"capabilities": capabilities})
    await qmp.execute("migrate-set-parameters", {"multifd-channels": 2, "max-bandwidth": 0})
    try:
        await qmp.execute("migrate-set-parameters", {"multifd-channels": 0})
        raise SystemExit("0 channels were taken")
    except ExecuteError as error:
        assert "expects a value between 1 and 255" in str(error), error
    states = []
    with qmp.listener(("MIGRATION", "STOP", "RESUME")) as events:
        await qmp.execute("migrate", {"uri": uri})
        async for event in events:
            states.append(event.get("data", {}).get("status", event["event"]))
            if states[-1] in ("completed", "failed"):
                break
    assert states == ["setup", "active", "STOP", "device", "completed"], states
    info = await qmp.execute("query-migrate")
    assert info["status"] == "completed" and info["ram"]["multifd-bytes"] > 0, info
    assert (await qmp.execute("query-status"))["status"] == "postmigrate"
    await qmp.execute("quit")
    await qmp.disconnect()


asyncio.run(asyncio.wait_for(main(), 100))
