"""Random damage to valid files, for tests of the helper processes that read them."""

import random
import struct

_NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1)


def damage(data: bytes, rng: random.Random) -> bytes:
    """Return a file with one to three changes: of bits, bytes, numbers, places or its length."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(found)) if found else 0
        # Heads, in which most of the structure is, are damaged more often.
        if rng.random() < 0.5:
            at = min(at, rng.randrange(200))
        length = rng.choice((1, 2, 4, 16, 200))
        kind = rng.randrange(7)
        if kind == 0 and found:
            found[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            found[at : at + length] = rng.randbytes(length)
        elif kind == 2:
            form = rng.choice(("<I", ">I", "<H", ">H"))
            number = rng.choice(_NUMBERS) & (0xFFFF if form[1] == "H" else 0xFFFFFFFF)
            found[at : at + struct.calcsize(form)] = struct.pack(form, number)
        elif kind == 3:
            del found[at : at + length]
        elif kind == 4:
            found[at:at] = found[at : at + length] * rng.randint(1, 5)
        elif kind == 5:
            other = rng.randrange(len(found) + 1)
            found[at : at + length] = found[other : other + length]
        else:
            del found[max(at, 4) :]
    return bytes(found)
