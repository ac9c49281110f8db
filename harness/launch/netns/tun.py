"""A TUN device: an interface whose packets a process reads and writes instead of a wire.

The kernel hands over up to 64 KB of one TCP stream at a time, with a header that says how to cut it
into packets of the interface's size (virtio_net_hdr of linux/virtio_net.h, 10 bytes). That is what
lets a relay written in Python carry gigabits; the streams still see a network of 1500 bytes.
"""

from __future__ import annotations

import fcntl
import os
import struct

from harness.settings import UserError

DEVICE = "/dev/net/tun"
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0  # linux/if_tun.h
TUN_NO_INFO_WITH_HEADER = 0x0001 | 0x1000 | 0x4000  # IFF_TUN, IFF_NO_PI, IFF_VNET_HDR
CHECKSUM_AND_SEGMENTS = 0x1 | 0x2 | 0x8  # TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO_ECN
HEADER = 10
LARGEST = HEADER + 65535
LAST_OF_DESTINATION = HEADER + 19  # byte of an IPv4 packet's address, the node's number


def open_device(name: str, device: str = DEVICE) -> int:
    """A new device in the network namespace of this process; it goes when it is closed."""
    try:
        found = os.open(device, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(
            found, TUNSETIFF, struct.pack("16sH22x", name.encode(), TUN_NO_INFO_WITH_HEADER)
        )
        fcntl.ioctl(found, TUNSETOFFLOAD, CHECKSUM_AND_SEGMENTS)
    except FileNotFoundError:
        raise UserError(f"{device} is missing: modprobe tun, as root") from None
    except PermissionError:
        raise UserError(f"{device} may not be opened: chmod 666 {device}, as root") from None
    except OSError as error:
        raise UserError(f"{device}: {error.strerror}: modprobe tun, as root") from None
    return found


def size_and_packets(data: bytes) -> tuple[int, int]:
    """What this would be on a wire: bytes with the headers of every packet, and packets."""
    size = len(data) - HEADER
    if not data[1]:
        return size, 1
    ip = (data[HEADER] & 15) * 4
    headers = ip + (data[HEADER + ip + 12] >> 4) * 4
    segment = data[4] | data[5] << 8
    packets = -(-(size - headers) // segment)
    return size + (packets - 1) * headers, packets
