"""A document of any length for the demo: facts about sea ferries, then a ship's log that is made up by rule."""

_FACTS = """\
A ferry is a ship that carries people, vehicles and goods over water on a fixed route, usually to a timetable. Some of
the oldest were rafts and rowing boats at river crossings; a ferryman was paid by the head, and towns grew where he
worked. Steam changed that in the nineteenth century: a crossing no longer waited for wind or tide. Train ferries
followed, with rails on the deck, so that whole wagons rolled on board. Car ferries came with the motor age. On a
roll-on, roll-off ship vehicles drive in through a door in the bow or the stern and leave at the other end without
turning. The wide, undivided car deck is quick to load but dangerous when water gets in, because water that moves freely
across a deck makes a ship unstable; that is why doors are now watched by cameras and sensors, and many ships carry a
second, inner door. Catamarans have two narrow hulls and go faster than a single wide one for the same power, yet they
are more sensitive to weight and waves. Hydrofoils lift their hull out of the water on wings. Hovercraft ride on a
cushion of air and can leave the water altogether. Double-ended ferries have a bridge and propellers at both ends and
never turn around, which saves minutes on short routes. Cable ferries pull themselves along a rope or a chain. Battery
ferries charge in port while cars drive off and on; on crossings of less than an hour this replaces diesel engines
almost entirely. A ferry's day is a loop of loading, crossing and unloading, and the loading takes as much care as the
crossing: heavy lorries go low and to the middle, dangerous goods stand apart, and nobody stays on the car deck at sea.
"""

_PORTS = ("Northhaven", "Gull Island", "Saltmere", "Old Quay", "Kirk Sound", "Lantern Bay", "Westerness")
_SHIPS = ("Petrel", "Guillemot", "Kittiwake", "Shearwater", "Fulmar")
_WEATHER = ("calm and clear", "light rain", "fog until noon", "a fresh breeze", "a heavy swell", "snow showers")
_LOADS = ("hay and machinery", "mail and medicine", "a school class", "fish on ice", "timber", "a travelling circus")


def document(num_entries: int) -> str:
    """The facts, then `num_entries` numbered lines of the log; the same text every time."""
    return f"{_FACTS}\nLog of the line:\n" + "\n".join(_entry(number) for number in range(1, num_entries + 1))


def _entry(number: int) -> str:
    origin = _PORTS[number % len(_PORTS)]
    target = _PORTS[(number * 3 + 1 + number // len(_PORTS)) % len(_PORTS)]
    target = target if target != origin else _PORTS[(number + 1) % len(_PORTS)]
    return (
        f"Crossing {number}: the {_SHIPS[number % len(_SHIPS)]} left {origin} for {target} with "
        f"{(number * 37) % 180 + 12} passengers, {(number * 11) % 45} cars and {_LOADS[number * 5 % len(_LOADS)]}; "
        f"{_WEATHER[number * 7 % len(_WEATHER)]}, {(number * 13) % 60 + 20} minutes."
    )
