"""Run ids: `cartpole-ppo-brisk-otter`. Drawn from the system's randomness, never from the run's seed."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator

from regatta.errors import UsageError

MAX_LENGTH = 64
RESERVED = ("last",)  # `find_run` gives it a meaning
_VALID = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")

_ADJECTIVES = """
    able agile airy alert amber ample amused apt azure balmy bold brave breezy bright brisk bubbly calm candid
    careful casual cheery civil clear clever coastal cosy crisp curious dapper daring dazzling deft devoted
    direct eager early earnest easy elated epic fair famous fearless fine fleet fluent fond frank free fresh
    gentle giddy glad gleaming golden graceful grand happy hardy hearty honest humble ideal jolly jovial keen
    kind lively lofty loyal lucid lucky lunar mellow merry mighty mild modest neat nimble noble novel open
    patient placid playful plucky polite proud quick quiet radiant rapid ready regal robust rosy serene sharp
    shiny silver sincere smart smooth snappy snug solar solid spry stable steady stellar sturdy subtle sunny
    sure tidy tranquil trusty upbeat valiant vivid warm wise witty zesty
"""
_ANIMALS = """
    albatross alpaca antelope axolotl badger barnacle bat beaver bee beetle bison bobcat buffalo bunting camel
    capybara caribou cat chamois cheetah chipmunk cicada clam cormorant crab crane cricket curlew deer dingo
    dolphin dormouse dove dragonfly duck eagle egret eider elk ermine falcon ferret finch firefly flamingo fox
    frog gannet gazelle gecko goose grebe grouse gull hare hawk hedgehog heron hippo hoopoe ibex ibis iguana
    impala jackdaw jaguar jay kestrel kingfisher kite kiwi koala lark lemur leopard linnet llama lobster loon
    lynx magpie manatee marmot marten merlin moose moth mouse narwhal newt nuthatch ocelot okapi oriole
    osprey otter owl panda panther parrot pelican penguin petrel pigeon pika plover pony puffin puma quail
    rabbit raven robin salmon sandpiper seal shrew skylark sparrow squid squirrel starling stork swallow swan
    swift tapir tern thrush tiger toucan trout turtle vole wallaby walrus warbler whale wombat wren yak zebra
"""
ADJECTIVES = tuple(_ADJECTIVES.split())
ANIMALS = tuple(_ANIMALS.split())


def is_name(name: str) -> bool:
    return len(name) <= MAX_LENGTH and _VALID.fullmatch(name) is not None


def check_name(name: str) -> str:
    """The user's own name for a run, if it can be one."""
    if name in RESERVED:
        raise UsageError(f"a run cannot be called {name!r}: that stands for the newest run; choose another name")
    if not is_name(name):
        raise UsageError(
            f"{name!r} cannot name a run; use lower-case letters, digits, dashes and dots, "
            f"beginning and ending with a letter or digit, at most {MAX_LENGTH} characters"
        )
    return name


def candidates(preset: str) -> Iterator[str]:
    """Endless names for a run of this preset; numbers come in once words alone have failed for a while."""
    stem = re.sub(r"[^a-z0-9.]+", "-", preset.lower()).strip("-.")[:36].rstrip("-.") or "run"
    tries = 0
    while True:
        name = f"{stem}-{secrets.choice(ADJECTIVES)}-{secrets.choice(ANIMALS)}"
        yield name if tries < 20 else f"{name}-{secrets.randbelow(10_000)}"
        tries += 1
