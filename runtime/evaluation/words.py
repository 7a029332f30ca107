"""Word lists from which keys of needles are made, and random words without meaning."""

import random
import re
import string

from sparsekv.formats.errors import UsageError

ADJECTIVES = re.findall(
    r"\w+",
    """
    able ancient basic bitter brave brief bright broad calm careful cheap clean clear clever cold common
    complex cool curious daily dark deep direct double dry eager early easy empty equal exact fair famous
    fancy fast final fine firm flat formal free fresh full funny gentle giant glad golden grand great green
    happy hard heavy hollow honest huge humble ideal jolly keen kind large lazy light little lonely long loud
    lucky magic major merry mild modern modest narrow neat noble normal odd open orange pale plain polite
    proud pure quick quiet random rapid rare ready rich ripe rough round royal rural safe secret shallow sharp
    shiny short silent silly simple slow small smart smooth soft solid special steady steep strange strict
    strong sudden sweet swift tall tame tender thin tidy tiny tough urban useful vast vivid warm weak wet
    white wide wild wise young
    """,
)

NOUNS = re.findall(
    r"\w+",
    """
    actor anchor animal apple arrow artist author badge baker balcony banana basket beach bell bench bird
    blanket boat book bottle branch bread bridge brush bucket butter button cabin cable camera candle canvas
    carpet castle cattle chair cherry circle circus cloud coat coffee copper cotton cousin cradle crystal
    curtain dance desert diamond doctor dragon driver eagle engine falcon farmer feather fence finger flame
    flower forest fountain garden gate glass glove guitar hammer harbor helmet honey horse hotel island jacket
    jewel judge jungle kettle kitchen ladder lake lamp lantern lemon letter library lion lizard magnet marble
    market meadow melon mirror monkey moon mountain museum needle nest novel ocean olive onion orchard oven
    owl oyster painter palace paper parade parrot pencil pepper piano picture pillow pilot planet pocket pony
    potato prince puzzle rabbit radio rain ribbon river road robot rocket saddle sailor salmon school shadow
    sheep shell shirt singer sister smoke soldier spider spoon spring statue stone street student summer table
    tailor teacher temple ticket tiger tower train tree tunnel turtle umbrella uncle valley vessel village
    violin wagon wallet whale wheel window winter wolf writer yard zebra
    """,
)

NUMBERS_OF = (
    "access code of the vault",
    "account number of the museum",
    "alarm code of the warehouse",
    "catalogue number of the violin",
    "combination of the bicycle lock",
    "contract number of the gardener",
    "customer number of the library",
    "employee number of the cook",
    "file number of the lawyer",
    "flight number to Vienna",
    "invoice number of the plumber",
    "licence plate of the ambulance",
    "locker number of the swimmer",
    "membership number of the chess club",
    "model number of the dishwasher",
    "order number of the wedding cake",
    "parcel number of the piano",
    "passport number of the pilot",
    "patent number of the umbrella",
    "phone number of the bakery",
    "policy number of the farmer",
    "population of the island",
    "prisoner number of the poet",
    "room key of the ambassador",
    "serial number of the telescope",
    "student number of the drummer",
    "tax number of the circus",
    "ticket number of the dentist",
    "tracking number of the carpet",
    "weight of the comet",
)


def things(number: int, random_numbers: random.Random) -> list[str]:
    """`number` different things that have a number; UsageError if there are fewer."""
    if number > len(NUMBERS_OF):
        raise UsageError(f"--questions {number}: niah-facts has {len(NUMBERS_OF)} for a context; ask for fewer")
    return random_numbers.sample(NUMBERS_OF, number)


def pairs(number: int, random_numbers: random.Random) -> list[str]:
    """`number` different keys of an adjective and a noun, as in RULER."""
    chosen = random_numbers.sample(range(len(ADJECTIVES) * len(NOUNS)), number)
    return [f"{ADJECTIVES[one // len(NOUNS)]}-{NOUNS[one % len(NOUNS)]}" for one in chosen]


def coined(number: int, letters: int, alphabet: str, random_numbers: random.Random) -> list[str]:
    """`number` different words of random letters."""
    words: dict[str, None] = {}
    while len(words) < number:
        words["".join(random_numbers.choices(alphabet, k=letters))] = None
    return list(words)


def variables(number: int, random_numbers: random.Random) -> list[str]:
    """`number` different names of five capital letters."""
    return coined(number, 5, string.ascii_uppercase, random_numbers)
