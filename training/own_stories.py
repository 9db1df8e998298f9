"""Generator of little stories, by a grammar.

A story has one cast: its hero, a friend, a thing and a place are chosen at the beginning and stay
the same to the end. Each event has a cause, and the end refers to the beginning. A model that
trains on these stories learns to keep a thread. Every maker accepts a seeded ``random.Random``.
"""
# ruff: noqa: SIM905

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from training.corpus import BOYS, GIRLS


@dataclass(frozen=True)
class Who:
    """Character of a story: a child, an animal or another creature."""

    name: str
    kind: str  # "girl", "dog", ...
    she: str
    her: str  # the object
    hers: str  # before a noun: "her", "his"

    @property
    def child(self) -> bool:
        return self.kind in ("girl", "boy")

    @property
    def tells(self) -> bool:
        """Return True for the one who tells the story: "I"."""
        return self.name == "I"


@dataclass(frozen=True)
class Cast:
    """Parts of a story that stay the same from the first sentence to the last."""

    hero: Who
    friend: Who
    thing: str  # "kite"
    look: str  # "red"
    place: str  # "the park"

    @property
    def it(self) -> str:
        return f"{self.look} {self.thing}"


ANIMALS = (
    "dog cat rabbit bear fox mouse bird frog duck lion elephant monkey horse cow pig sheep turtle"
    " squirrel owl bee goat puppy kitten tiger penguin hen donkey deer hedgehog"
).split()  # fmt: skip
BEINGS = "dragon robot princess prince king queen knight fairy giant pirate farmer wizard".split()
_SHES = {"princess", "queen", "fairy", "hen", "cow"}
_HES = {"prince", "king", "knight", "pirate", "wizard"}
PETS = (
    "Max Spot Fluffy Buddy Coco Pip Bella Rex Milo Daisy Tiny Ruby Sunny Oscar Teddy Rosie Lucky"
    " Nibbles Bubbles Gus Hazel Pepper Ginger Poppy Dot Biscuit Fin Momo Kiki Bobo Leo Zara"
).split()  # fmt: skip
THINGS = {
    "kite": "fly it in the wind",
    "ball": "kick it high into the air",
    "doll": "brush its hair",
    "boat": "let it swim on the pond",
    "drum": "play loud songs on it",
    "hat": "wear it on sunny days",
    "scarf": "wear it when it was cold",
    "book": "look at its pictures",
    "truck": "fill it with sand",
    "balloon": "hold its long string",
    "basket": "carry apples in it",
    "bell": "hear it ring",
    "cup": "drink warm milk from it",
    "blanket": "sleep under it",
    "lamp": "read by its soft light",
    "train": "push it around the room",
    "flute": "play sweet songs on it",
    "umbrella": "walk in the rain with it",
    "bucket": "fill it with shells",
    "puzzle": "put its pieces together",
    "teddy": "hug it at night",
    "ring": "see it shine in the sun",
    "box": "keep little stones in it",
    "bike": "ride it down the hill",
    "key": "wear it on a string",
}
LOOKS = "red blue green yellow pink purple white brown orange shiny old new little".split()
PLACES = (
    "the park", "the forest", "the garden", "the beach", "the farm", "the meadow", "the hill",
    "the river", "the old barn", "the pond", "the playground", "the village",
)  # fmt: skip
SPOTS = (
    "under the bench", "behind the big tree", "in the tall grass", "under the bridge",
    "behind the rocks", "in the bushes", "next to the fence", "under the leaves",
    "beside the path", "behind the wall",
)  # fmt: skip
SNACKS = "apple cookie carrot sandwich pear muffin banana berry pie cake".split()


# Paragraphs, and further topics of the story.
Plot = tuple[list[str], list[str]]


def child(rng: random.Random, *taken: str) -> Who:
    girl = rng.random() < 0.5
    name = rng.choice([n for n in (GIRLS if girl else BOYS) if n not in taken])
    return Who(name, "girl", "she", "her", "her") if girl else Who(name, "boy", "he", "him", "his")


def creature(rng: random.Random, *taken: str, kinds: list[str] | None = None) -> Who:
    kind = rng.choice(kinds or (ANIMALS if rng.random() < 0.75 else BEINGS))
    name = rng.choice([n for n in PETS if n not in taken])
    female = kind in _SHES or (kind not in _HES and rng.random() < 0.45)
    return Who(name, kind, *(("she", "her", "her") if female else ("he", "him", "his")))


def cast(rng: random.Random) -> Cast:
    hero = child(rng) if rng.random() < 0.5 else creature(rng)
    if hero.child and rng.random() < 0.5:
        friend = child(rng, hero.name)
    else:
        friend = creature(rng, hero.name, kinds=[a for a in ANIMALS if a != hero.kind])
    return Cast(
        hero, friend, rng.choice(list(THINGS)), rng.choice(LOOKS), rng.choice(PLACES)
    )  # fmt: skip


def a(words: str) -> str:
    return f"an {words}" if words[0] in "aeiou" else f"a {words}"


def cap(text: str) -> str:
    return text[0].upper() + text[1:]


def said(rng: random.Random, who: str, words: str, verb: str = "said") -> str:
    """Return the words with their speaker, before or after."""
    if rng.random() < 0.5:
        return f'{cap(who)} {verb}, "{words}"'
    spoken = words[:-1] + "," if words.endswith(".") else words
    return f'"{spoken}" {verb} {who}.'


def opening(rng: random.Random, c: Cast) -> str:
    h = c.hero
    if h.tells:
        return rng.choice(
            [f"I hope you are well. I must tell you what happened near {c.place}.",
             "How are you? I am fine. I want to tell you what happened to me.",
             f"I live near {c.place} now, and I have a story for you.",
             "Thank you for your letter! So much has happened since then."]
        )  # fmt: skip
    kind = h.kind if h.kind in BEINGS and rng.random() < 0.5 else f"little {h.kind}"
    home = rng.choice(
        [f"near {c.place}", f"in a small house near {c.place}", f"not far from {c.place}"]
    )
    first = rng.choice(
        [f"Once upon a time, there was {a(kind)} named {h.name}.",
         f"Once upon a time, there was {a(kind)} named {h.name} who lived {home}.",
         f"Once there was {a(kind)}. {cap(h.hers)} name was {h.name}.",
         f"There once was {a(kind)} named {h.name}. {cap(h.she)} lived {home}.",
         f"{h.name} was {a(kind)} who lived {home}.",
         f"A long time ago, {a(kind)} named {h.name} lived {home}."]
    )  # fmt: skip
    second = rng.choice(
        ["{H} was kind and always said hello.", "{H} loved to sing in the morning.", "",
         "{H} was very curious and asked many questions.", "{H} liked to help everyone.",
         "{H} was small, but {h} was brave.", "{H} was happy most of the time.", "",
         "Everyone there liked {o}."]
    ).format(H=cap(h.she), h=h.she, o=h.her)  # fmt: skip
    return f"{first} {second}".strip()


def treasure(rng: random.Random, c: Cast) -> str:
    """Return sentences about the hero's thing, and its use."""
    h = c.hero
    giver = rng.choice(["grandma", "grandpa", "mom", "dad", "aunt"])
    return rng.choice(
        [f"{h.name} had {a(c.it)}. {cap(h.she)} loved to {THINGS[c.thing]}.",
         f"{cap(h.hers)} best thing was {a(c.it)}. {cap(h.hers)} {giver} had made it for {h.her}."
         f" Every day, {h.name} liked to {THINGS[c.thing]}.",
         f"{h.name} had {a(c.it)} that {h.hers} {giver} had given {h.her}."
         f" {cap(h.she)} liked to {THINGS[c.thing]}."]
    )  # fmt: skip


def intro(c: Cast) -> str:
    """Return the friend, as introduced at the first meeting."""
    return f"{a(c.friend.kind)} named {c.friend.name}"


def went(rng: random.Random, c: Cast, with_thing: bool = False) -> str:
    h = c.hero
    carrying = f" with {h.hers} {c.it}" if with_thing else ""
    when = rng.choice(["One day", "One sunny day", "One morning", "One windy day", "One afternoon"])
    return rng.choice(
        [f"{when}, {h.name} went to {c.place}{carrying}.",
         f"{when}, {h.name} walked to {c.place}{carrying}."]
    )  # fmt: skip


def evening(rng: random.Random, c: Cast, thing: bool = True) -> str:
    """Return an end that refers to the beginning."""
    h, f = c.hero, c.friend
    ends = [
        f"From that day on, {h.name} and {f.name} were best friends.",
        f"That night, {h.name} thought of {f.name} and fell asleep with a smile.",
        f"{h.name} never forgot how {f.name} had helped {h.her}.",
        f"After that day, {h.name} and {f.name} met at {c.place} every day.",
        f"And whenever {h.name} went to {c.place} again, {f.name} came too.",
        f"{h.name} and {f.name} laughed and walked home together.",
    ]
    if thing:
        ends += [
            f"That night, {h.name} put the {c.it} next to {h.hers} bed and fell asleep happy.",
            f"And {h.name} always took good care of {h.hers} {c.it}.",
            f"Now {h.name} and {f.name} could {THINGS[c.thing]} together.",
        ]
    return rng.choice(ends)


def met(rng: random.Random, c: Cast) -> str:
    f = c.friend
    return rng.choice(
        [f"Just then, {a(f.kind)} named {f.name} came by.",
         f"Then {c.hero.name} saw {a(f.kind)} named {f.name}.",
         f"{cap(a(f.kind))} named {f.name} heard {c.hero.her} and came closer."]
    )  # fmt: skip


# --- plots ------------------------------------------------------------------------------------


def lost(rng: random.Random, c: Cast) -> Plot:
    h, f = c.hero, c.friend
    first, second, third = rng.sample(SPOTS, 3)
    why = rng.choice(
        [f"The wind blew it {third}", f"You left it {third} when you played",
         f"A little mouse pulled it {third}", f"It fell down and rolled {third}"]
    )  # fmt: skip
    return [
        f"{opening(rng, c)} {treasure(rng, c)}",
        f"{went(rng, c, True)} {cap(h.she)} played all morning. But when it was time to go home,"
        f" the {c.it} was gone! {h.name} was very sad.",
        f"{cap(h.she)} looked {first}, but it was not there. {cap(h.she)} looked {second}, but it"
        f" was not there. {rng.choice(['Tears came to', 'There were tears in'])} {h.hers} eyes.",
        f"{met(rng, c)} "
        + said(rng, f.name, rng.choice(["Why are you sad?", "What is wrong?"]), "asked")
        + " "
        + said(rng, h.name, f"I lost my {c.it}.")
        + " "
        + said(rng, f.name, f"I saw it! {why}. Come with me."),
        f"They looked {third} together. There it was! {h.name} picked up the {c.it} and hugged"
        f" {f.name}. "
        + said(rng, h.name, rng.choice(["Thank you for helping me!", "You are a good friend!"]))
        + f" Then they played with the {c.it} until the sun went down. {evening(rng, c)}",
    ], [f"a lost {c.thing}", a(c.thing), f"{h.name} and {a(c.thing)}"]


STICKS = (
    ("high up in a tree", "jumped up and down, but the tree was too tall", "climbed up the tree"),
    ("on the roof of the shed", "threw a stick at it, but the roof was too high",
     "brought a ladder and climbed up"),
    ("in the middle of the pond", "reached out with one arm, but it was too far away",
     "took a long branch and pulled it to the side"),
    ("in a deep hole", "reached down, but the hole was too deep", "found a rope and let it down"),
    ("behind a big fence", "pushed the gate, but it was locked", "went under the fence"),
)  # fmt: skip


def stuck(rng: random.Random, c: Cast) -> Plot:
    h, f = c.hero, c.friend
    where, tried, helped = rng.choice(STICKS)
    reward = rng.choice(SNACKS)
    return [
        f"{opening(rng, c)} {treasure(rng, c)}",
        f"{went(rng, c, True)} "
        + rng.choice(["A strong wind blew.", f"{h.name} slipped on a wet stone.",
                      f"{h.name} ran too fast and fell."])
        + f" The {c.it} flew away and landed {where}."
        f' "Oh no! My {c.it}!" cried {h.name}.',
        f"{h.name} {tried}. {cap(h.she)} tried again and again, but {h.she} could not get it.",
        f"{met(rng, c)} "
        + said(rng, f.name, rng.choice(["Do not cry. I can help you.", "I have an idea.",
                                        "Do not worry. We can do it together."]))
        + f" {f.name} {helped}. Soon {f.she} had the {c.it} and gave it back to {h.name}.",
        said(rng, h.name, f"Thank you, {f.name}!")
        + f" {h.name} had {a(reward)} and gave half of it to {f.name}. They ate the {reward} and"
        f" were happy that the {c.it} was not {where} any more. {evening(rng, c)}",
    ], [a(c.thing), a(c.it), f"{h.name} and {a(c.thing)}"]  # fmt: skip


def sharing(rng: random.Random, c: Cast) -> Plot:
    h, f = c.hero, c.friend
    wise = rng.choice(["an old owl", "a kind old man", "a kind old woman", "the teacher",
                       "a wise turtle"])  # fmt: skip
    the_wise = "the " + wise.split(" ", 1)[1]
    return [
        f"{opening(rng, c)} {cap(h.hers)} friend was {intro(c)}.",
        f"{went(rng, c)} {f.name} came too. On the ground they found {a(c.it)}."
        f' "It is mine! I saw it first," said {h.name}. "No, it is mine!" said {f.name}.',
        f"{h.name} pulled at one side and {f.name} pulled at the other side. Then"
        + rng.choice([" they both fell down", " both fell into the mud", " it made a loud crack"])
        + f". Now {h.name} was angry and {f.name} was sad.",
        f"{cap(wise)} had seen it all. "
        + said(rng, the_wise, "If you share, you can both be happy.")
        + f" {h.name} thought about it. {cap(h.she)} looked at {f.name} and said,"
        f' "I am sorry. Let\'s take turns. You can go first."',
        f"{f.name} smiled. First {f.name} had the {c.it}, and then {h.name} had it. It was much"
        f" more fun to {THINGS[c.thing]} together. They thanked {the_wise}. {evening(rng, c)}",
    ], ["sharing", a(c.thing), f"two friends and {a(c.thing)}"]


FEARS = (
    ("the dark", "sat with a small light and looked at the stars", "the stars are so pretty"),
    ("the thunder", "counted the seconds after each flash", "thunder is only a loud noise"),
    ("the deep water", "held hands and put their feet in, step by step", "the water is fun"),
    ("high places", "climbed up one step at a time", "you can see far from up here"),
    ("loud noises", "hit a pot with a spoon, first softly and then loudly", "noise can be music"),
    ("the big slide", "went down the small slide first", "sliding is like flying"),
    ("spiders", "watched a tiny spider make its web", "spiders are only busy and small"),
)


def fear(rng: random.Random, c: Cast) -> Plot:
    h, f = c.hero, c.friend
    what, steps, learnt = rng.choice(FEARS)
    return [
        f"{opening(rng, c)} But there was one problem. {h.name} was afraid of {what}.",
        f"One day, {h.hers} friend, {intro(c)}, came to visit. "
        + said(rng, f.name, f"Let's go to {c.place}!")
        + " "
        + said(rng, h.name, f"I can not go. I am afraid of {what}."),
        f"{f.name} did not laugh. "
        + said(rng, f.name, f"I was afraid of {what} too. I will show you what helped me.")
        + f" So they went to {c.place} and {steps}.",
        f"At first, {h.name} held on to {f.name} very tightly. Then {h.she} opened {h.hers} eyes."
        f' "Oh, {learnt}!" said {h.name}. {cap(h.she)} was not afraid any more.',
        f'"You are brave," said {f.name}. {h.name} was proud. When {h.she} came home, {h.she}'
        f' told {h.hers} mom, "I am not afraid of {what} now!" {evening(rng, c, False)}',
    ], [f"{a(h.kind)} who was afraid of {what}", f"being afraid of {what}"]


GIFTS = (
    ("cake", "flour, milk and sugar", "eggs", "the hens"),
    ("apple pie", "flour and butter", "apples", "the apple tree"),
    ("soup", "carrots and peas", "potatoes", "the field"),
    ("flower crown", "green leaves and a string", "flowers", "the meadow"),
    ("birthday card", "paper and glue", "paint", "the shop"),
    ("berry jam", "sugar and a big pot", "berries", "the bushes"),
    ("warm hat", "two needles", "wool", "the sheep"),
)


def gift(rng: random.Random, c: Cast) -> Plot:
    h, f = c.hero, c.friend
    what, has, needs, where = rng.choice(GIFTS)
    loved = rng.choice(["grandma", "grandpa", "mom", "dad", "sister", "brother"])
    return [
        f"{opening(rng, c)} Tomorrow was the birthday of {h.hers} {loved}, and {h.name} wanted to"
        f" make {a(what)} for the birthday.",
        f"{h.name} had {has}. But {h.she} had no {needs}. "
        + said(rng, h.name, f"I can not make {a(what)} without {needs}."),
        f"So {h.name} went to {where} to get some. On the way {h.she} met {intro(c)}. "
        + said(rng, f.name, "Where are you going?", "asked")
        + " "
        + said(rng, h.name, f"I need {needs} for {a(what)}. It is for my {loved}.")
        + f" {f.name} said, \"I will help you carry it home.\"",
        f"Together they got the {needs} and went back home. {h.name} and {f.name} worked all"
        f" afternoon. At last, the {what} was ready. It looked wonderful.",
        f"The next day, {h.name} gave the {what} to {h.hers} {loved}."
        f' "This is the best {what} ever!" said {h.hers} {loved}. {h.name} said, "{f.name} helped'
        f' me to get the {needs}." So {f.name} came to the birthday too.'
        f" {evening(rng, c, False)}",
    ], ["a birthday", a(what), f"{h.name} and {a(what)}"]  # fmt: skip


TROUBLES = (
    ("had a thorn in one foot", "pulled out the thorn very slowly", "it does not hurt any more"),
    ("was very hungry", "gave {o} a sandwich and some berries", "I am not hungry any more"),
    ("was cold and wet", "wrapped {o} in a warm blanket", "now I am warm and dry"),
    ("could not find the way home", "looked at the map and showed {o} the way",
     "now I know where my home is"),
    ("was caught in a net", "cut the net with a sharp stone", "now I am free again"),
    ("was all alone and had nobody to play with", "played hide and seek with {o}",
     "now I have a friend"),
)  # fmt: skip
RETURNS = (
    ("{H} fell into a deep hole and could not get out", "pulled {o} out with a long branch"),
    ("{H} got lost in the fog", "heard {o} call and led {o} back to the path"),
    ("{H} lost a shoe in the mud", "found it and washed it clean"),
    ("it began to rain hard and {H} was far from home", "took {o} to a dry cave"),
    ("a big wave took {H}'s basket away", "swam after it and brought it back"),
    ("{H} had a heavy bag and was very tired", "carried the bag all the way home"),
)


def kindness(rng: random.Random, c: Cast) -> Plot:
    h, f = c.hero, c.friend
    trouble, remedy, relief = rng.choice(TROUBLES)
    accident, rescue = rng.choice(RETURNS)
    return [
        opening(rng, c),
        f"{went(rng, c)} There {h.she} saw {intro(c)}. {f.name} {trouble}."
        f' "Please help me," said {f.name}.',
        f"{h.name} {remedy.format(o=f.her)}. "
        + said(rng, f.name, f"Thank you, {relief}.")
        + " "
        + said(rng, f.name, "One day I will help you too.")
        + f" {h.name} smiled and went home.",
        f"Some days later, {accident.format(H=h.name)}. "
        + rng.choice([f"{cap(h.she)} called for help.", f'"Help!" cried {h.name}.'])
        + f" Who came to help? It was {f.name}! {f.name} {rescue.format(o=h.her)}.",
        f'"You helped me when I {trouble}," said {f.name}. "So now I helped you."'
        f" {h.name} hugged {f.name}. {evening(rng, c, False)}",
    ], ["being kind", f"{a(h.kind)} who helped {a(f.kind)}", f"{a(h.kind)} and {a(f.kind)}"]


BREAKS = (
    ("vase", "ran through the house", "glued the pieces together"),
    ("window", "threw a ball in the house", "put in new glass"),
    ("cup", "danced on the table", "put flowers in what was left of it"),
    ("clock", "played with the little wheels", "mended it with a small screw"),
    ("chair", "jumped up and down on it", "put in a new leg with a hammer"),
    ("picture", "climbed up the shelf", "made a new frame for it"),
)


def truth(rng: random.Random, c: Cast) -> Plot:
    h, f = c.hero, c.friend
    what, did, mended = rng.choice(BREAKS)
    parent = rng.choice(["mom", "dad", "grandma", "grandpa"])
    where = rng.choice(["under the bed", "in the garden", "behind the curtain", "in the closet"])
    return [
        f"{opening(rng, c)} {cap(h.hers)} friend {f.name} the {f.kind} often came to play.",
        f"One day, {h.name} {did}. {cap(h.hers)} {parent} had said that {h.she} must not do it."
        f" Crash! The {what} was broken. {h.name} was scared and hid {where}.",
        f"{f.name} found {h.her} there. "
        + said(rng, f.name, "What is the matter?", "asked")
        + " "
        + said(rng, h.name, f"I broke the {what}. What should I do?")
        + " "
        + said(rng, f.name, "Tell the truth. I will come with you."),
        f'So {h.name} went to {h.hers} {parent} and said, "I am sorry. I broke the {what}'
        f' because I {did}." {cap(h.hers)} {parent} was quiet for a moment and then said,'
        f' "I am glad that you told me the truth."',
        f"Together they {mended}. {h.name} felt much better. {cap(h.she)} promised to be more"
        f" careful, and {h.she} thanked {f.name}. {evening(rng, c, False)}",
    ], [f"a broken {what}", "telling the truth"]


SKILLS = (
    ("swim", "went under and came up with water in the nose", "kick your legs slowly"),
    ("whistle", "blew and blew, but only air came out", "make your lips small and round"),
    ("ride a bike", "fell into the grass", "look ahead and not at your feet"),
    ("dance", "stepped on everybody's toes", "listen to the music and count to three"),
    ("skate", "slipped and sat down on the ice", "bend your knees a little"),
    ("climb the big tree", "slid down to the ground", "hold on to the strong branches"),
    ("jump over the stream", "landed in the cold water", "run fast before you jump"),
    ("paint a rainbow", "made a big brown spot", "wash your brush after each color"),
)


def practice(rng: random.Random, c: Cast) -> Plot:
    h, f = c.hero, c.friend
    skill, failed, advice = rng.choice(SKILLS)
    return [
        f"{opening(rng, c)} More than anything, {h.name} wanted to {skill}.",
        f"{went(rng, c)} {cap(h.she)} tried to {skill}. But {h.she} {failed}. {cap(h.she)} tried a"
        f" second time. Again {h.she} {failed}. "
        + said(rng, h.name, f"I will never learn to {skill}."),
        f"{met(rng, c)} {f.name} could {skill} very well. "
        + said(rng, f.name, f"Do not give up. You must {advice}."),
        f"{h.name} tried once more. {cap(h.she)} remembered what {f.name} had said. Every day"
        f" {h.she} came to {c.place}, and every day it went a little better.",
        f'And then, one day, {h.name} could {skill}! "Look at me!" {h.she} shouted. {f.name}'
        f" clapped and cheered. "
        + said(rng, f.name, "You did it because you did not give up.")
        + f" {evening(rng, c, False)}",
    ], [f"{a(h.kind)} who wanted to {skill}", f"learning to {skill}"]


PLANTS = (
    ("sunflower", "yellow flower", "gave the seeds to the birds"),
    ("pumpkin", "orange pumpkin", "made soup for everyone"),
    ("apple tree", "red apple", "shared the apple"),
    ("strawberry", "red strawberry", "ate it with cream"),
    ("bean", "long green bean", "climbed up to see the sky"),
    ("rose", "pink rose", "gave the rose to grandma"),
)


def growing(rng: random.Random, c: Cast) -> Plot:
    h, f = c.hero, c.friend
    plant, result, use = rng.choice(PLANTS)
    return [
        f"{opening(rng, c)} One day, {h.name} found a tiny seed near {c.place}. "
        + said(rng, h.name, f"I wonder if it will be {a(plant)}.")
        + f" {cap(h.she)} put the seed into the ground and gave it water.",
        f"The next day, {h.name} looked, but there was nothing. On the second day, there was"
        f" nothing. {h.name} was sad. {cap(intro(c))} came by. "
        + said(rng, f.name, "A seed needs water, sun and time. You must wait."),
        f"So {h.name} waited. Every morning {h.she} gave water to the seed, and {f.name} sat"
        f" beside {h.her} and told stories. "
        + rng.choice(["It rained and the sun shone.", "The days became warm."]),
        f'Then, one morning, {h.name} saw a little green leaf. "It is growing!" {h.she} cried. The'
        f" {plant} grew and grew. At last there was a big {result}.",
        f"{h.name} and {f.name} {use}. "
        + said(rng, h.name, "It was good to wait.")
        + f" They kept one seed for the next spring. {evening(rng, c, False)}",
    ], ["a seed", a(plant), "waiting"]


NOISES = (
    ("tap, tap, tap", "branch that hit the window in the wind", "cut the branch"),
    ("squeak, squeak", "tiny mouse that looked for cheese", "gave it a piece of cheese"),
    ("meow, meow", "little kitten that was lost", "gave it warm milk"),
    ("hoo, hoo", "baby owl that had fallen from its nest", "put it back into the nest"),
    ("drip, drip, drip", "hole in the roof where the rain came in", "put a bucket under it"),
    ("scratch, scratch", "puppy that wanted to come in", "opened the door and let it in"),
)


def noise(rng: random.Random, c: Cast) -> Plot:
    h, f = c.hero, c.friend
    sound, cause, did = rng.choice(NOISES)
    return [
        f"{opening(rng, c)} One night, {h.name} lay in bed and could not sleep. {cap(h.hers)}"
        f" friend {f.name} the {f.kind} was there that night too.",
        f'Then they heard a strange noise: "{cap(sound)}."'
        f" {h.name} pulled the blanket over {h.hers} head. "
        + said(rng, h.name, rng.choice(["Is it a monster?", "What was that?"]), "asked"),
        said(rng, f.name, "Let's go and look. We are two, so we do not need to be afraid.")
        + f' They took a light and walked on their toes. "{cap(sound)}," went the noise again.'
        " Now it was very near.",
        f"{h.name} opened the door a little and looked. {cap(h.she)} began to laugh. It was not a"
        f" monster. It was only a {cause}! {h.name} and {f.name} {did}.",
        "Then they went back to bed. "
        + said(rng, h.name, "It is good that we looked.")
        + f" The noise did not come again, and soon {h.name} and {f.name} were fast asleep.",
    ], ["a strange noise", "the night", f"{h.name} and a strange noise"]


JOBS = (
    ("swept the leaves from the path", "old Mrs. Hill", "she"),
    ("washed all the windows", "the baker", "he"),
    ("fed the chickens every morning", "the farmer", "he"),
    ("carried wood into the house", "old Mr. Brown", "he"),
    ("watered the flowers for a week", "the neighbor", "she"),
    ("picked apples from the tall tree", "grandpa", "he"),
)


def earning(rng: random.Random, c: Cast) -> Plot:
    h, f = c.hero, c.friend
    job, boss, boss_she = rng.choice(JOBS)
    coins = rng.choice(["three", "four", "five", "six", "ten"])
    return [
        f"{opening(rng, c)} One day, {h.name} saw {a(c.it)} in the window of a shop. {cap(h.she)}"
        f" wanted to {THINGS[c.thing]}. But it cost {coins} coins, and {h.name} had no coins.",
        f"{h.name} told {h.hers} friend {f.name} the {f.kind} about the {c.it}. "
        + said(rng, f.name, "You can work for the coins. I will help you."),
        f"So they went to {boss}. "
        + said(rng, h.name, "Can we help you?", "asked")
        + f" {cap(boss)} was glad. {h.name} and {f.name} {job}. It was hard work, but they did not"
        " stop.",
        f'"You did a very good job," said {boss}, and {boss_she} gave them {coins} coins.'
        f" {h.name} ran to the shop. The {c.it} was still in the window! {cap(h.she)} gave the"
        f" {coins} coins to the man and got the {c.it}.",
        f'"It is for both of us," said {h.name} to {f.name}, "because we worked together."'
        f" {evening(rng, c)}",
    ], ["a shop", a(c.thing), "hard work"]


def rainy(rng: random.Random, c: Cast) -> Plot:
    h, f = c.hero, c.friend
    built, of, after = rng.choice(
        [("a castle", "boxes", "the king and the queen of the castle"),
         ("a ship", "chairs", "brave sailors on the wide sea"),
         ("a tent", "blankets", "campers in a dark forest"),
         ("a train", "boxes and plates", "drivers of the fastest train"),
         ("a rocket", "pillows", "the first ones on the moon")]
    )  # fmt: skip
    thing = built.split()[1]
    return [
        f"{opening(rng, c)} {h.name} wanted to go to {c.place} with {intro(c)}, {h.hers} friend.",
        f"But that day it rained and rained. {h.name} and {f.name} had to stay at home. "
        + said(rng, h.name, "I am so bored. I wanted to play outside."),
        f"{f.name} looked around the room and had an idea. "
        + said(rng, f.name, f"Let's build {built} of {of}!")
        + f" They carried all the {of} they could find. The first {thing} fell down. They laughed"
        " and built it again, and this time it was strong.",
        f"All afternoon, {h.name} and {f.name} played that they were {after}. They forgot the rain"
        f" outside. {cap(h.hers)} mom brought them {rng.choice(['warm milk', 'cookies', 'soup'])},"
        f" and they ate in the {thing}.",
        f'Then the sun came out. "Now we can go to {c.place}," said {f.name}. {h.name} looked at'
        f' the {thing} and said, "Let\'s stay a little longer. Rainy days can be fun too!"',
    ], ["a rainy day", built, f"{h.name} and {built}"]


PLOTS: tuple[Callable[[random.Random, Cast], Plot], ...] = (
    lost, stuck, sharing, fear, gift, kindness, truth, practice, growing, noise, earning, rainy,
)  # fmt: skip


def own_story(rng: random.Random) -> tuple[str, str]:
    """Return a story, and its topic: ``a dog``, ``a girl named Mia``, ``Mia and a kite``."""
    c, plot = cast(rng), rng.choice(PLOTS)
    paragraphs, topics = plot(rng, c)
    h, f = c.hero, c.friend
    if rng.random() < 0.5:
        about = rng.choice(topics)
    elif h.child:
        about = rng.choice([f"{a(h.kind)} named {h.name}", h.name, f"{h.name} and {f.name}"])
    else:
        about = rng.choice([a(h.kind)] * 4 + [f"a little {h.kind}", f"{a(h.kind)} named {h.name}"])
    return rng.choice([" ", "\n", "\n"]).join(paragraphs), about
