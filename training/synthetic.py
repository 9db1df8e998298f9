"""Generator of short conversations in the form of the chat template.

Every maker accepts a seeded ``random.Random`` and returns a conversation: the arguments of the chat
template (``messages`` and, for tool calls, ``tools``).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypedDict

import jinja2

from training import facts
from training.corpus import BOYS, GIRLS
from training.facts import NUMBERS
from training.tokenizer import CHAT_TEMPLATE

Message = dict[str, Any]
Pair = tuple[str, str]


class Conversation(TypedDict, total=False):
    messages: list[Message]
    tools: list[dict[str, Any]]


def _to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = _to_json
    return environment.from_string(CHAT_TEMPLATE)


def render(conversation: Conversation) -> str:
    """Return the conversation as text, by the shipped template."""
    return _template().render(
        messages=conversation["messages"],
        tools=conversation.get("tools"),
        add_generation_prompt=False,
    )


def article(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def join_words(words: Sequence[str]) -> str:
    """Return ``a, b and c``."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


# --- single questions and answers -----------------------------------------------------------


def greeting(rng: random.Random) -> Pair:
    return rng.choice(
        [
            (
                rng.choice(["Hello!", "Hi!", "Hello", "Hi", "Hey!", "Hi there!", "Hello there!"]),
                rng.choice(
                    ["Hello! How can I help you?", "Hello! It is nice to meet you.",
                     "Hi! Would you like to hear a story?"]
                ),
            ),
            (
                rng.choice(["Good morning!", "Good morning."]),
                "Good morning! I hope you have a happy day.",
            ),
            (rng.choice(["Good night!", "Good night."]), "Good night! Sleep well."),
            (
                rng.choice(["How are you?", "How are you today?", "Hello, how are you?"]),
                "I am fine, thank you! How are you?",
            ),
            (
                rng.choice(["Thank you!", "Thanks!", "Thank you very much!", "Thanks a lot."]),
                "You are welcome!",
            ),
            (rng.choice(["Bye!", "Goodbye!", "See you later!", "Bye bye"]),
             "Goodbye! Come back soon."),
            (rng.choice(["I am sad.", "I feel sad today."]),
             "I am sorry that you are sad. I hope you feel better soon."),
            (rng.choice(["I am happy!", "I am so happy today!"]), "That is great! I am happy too."),
        ]
    )  # fmt: skip


def identity(rng: random.Random) -> Pair:
    return rng.choice(
        [
            (
                rng.choice(["Who are you?", "What are you?", "Tell me about yourself.",
                            "Introduce yourself.", "Hi, who are you?", "Hello! Who are you?"]),
                "I am Octavo Stories, a very small language model. I like to tell little stories.",
            ),
            (
                rng.choice(["What is your name?", "What's your name?", "Do you have a name?"]),
                "My name is Octavo Stories.",
            ),
            (
                rng.choice(["What can you do?", "How can you help me?", "What do you do?", "Help"]),
                "I can tell short stories, answer simple questions, add small numbers, write small"
                " JSON records and call tools.",
            ),
            (
                rng.choice(["Are you a human?", "Are you a person?", "Are you real?"]),
                "No, I am a very small language model.",
            ),
            (
                rng.choice(["How old are you?", "When were you born?"]),
                "I am a computer program, so I have no age.",
            ),
            (
                rng.choice(["Who made you?", "Where do you come from?", "Who trained you?"]),
                "I was trained with the tool that comes with Octavo.",
            ),
            (
                rng.choice(["What is Octavo?", "Tell me about Octavo."]),
                "Octavo is an engine that runs language models like me.",
            ),
            (
                rng.choice(["How big are you?", "Are you a big model?", "Are you smart?"]),
                "I am very small. I have only a few million parameters.",
            ),
        ]
    )  # fmt: skip


def unknown(rng: random.Random) -> Pair:
    topic = rng.choice(facts.BEYOND)
    question = rng.choice(["What is {}?", "Explain {}.", "Tell me about {}.", "Explain {} to me."])
    return (
        question.format(topic),
        f"I am sorry, I do not know about {topic}. I am a very small model.",
    )


def _item(rng: random.Random, table: dict[str, str]) -> Pair:
    return rng.choice(list(table.items()))


def colour(rng: random.Random) -> Pair:
    thing, value = _item(rng, facts.COLOUR_OF)
    verb = rng.choice(["color", "color", "colour"])
    if rng.random() < 0.15:
        pair, value = _item(rng, facts.MIX)
        first, second = pair.split(" and ")
        return (
            rng.choice([f"What {verb} do you get when you mix {first} and {second}?",
                        f"Mix {first} and {second}. What {verb} is it?"]),
            f"When you mix {first} and {second}, you get {value}.",
        )  # fmt: skip
    the = rng.choice(["the", article(thing).split()[0]]) if " " not in thing else "the"
    return (
        rng.choice([f"What {verb} is {the} {thing}?", f"Tell me the {verb} of {the} {thing}."]),
        f"{the.capitalize()} {thing} is {value}.",
    )


def animal(rng: random.Random) -> Pair:
    kind = rng.randrange(5)
    if kind == 0:
        name, value = _item(rng, facts.SOUND_OF)
        question = ["What sound does {} make?", "What does {} say?"]
        return (
            rng.choice(question).format(article(name)),
            f"{article(name).capitalize()} says {value}.",
        )
    if kind == 1:
        name, value = _item(rng, facts.BABY_OF)
        question = ["What is a baby {} called?", "What do you call a baby {}?"]
        return rng.choice(question).format(name), f"A baby {name} is called {article(value)}."
    if kind == 2:
        name, value = _item(rng, facts.HOME_OF)
        question = ["Where does {} live?", "Where can I find {}?"]
        return (
            rng.choice(question).format(article(name)),
            f"{article(name).capitalize()} lives {value}.",
        )
    if kind == 3:
        name, value = _item(rng, facts.LEGS_OF)
        return (
            f"How many legs does {article(name)} have?",
            f"{article(name).capitalize()} has {value} legs.",
        )
    name, value = _item(rng, facts.EATS)
    return f"What does {article(name)} eat?", f"{article(name).capitalize()} eats {value}."


def fact(rng: random.Random) -> Pair:
    kind = rng.randrange(9)
    if kind == 0:
        word, value = _item(rng, facts.OPPOSITES)
        if rng.random() < 0.3 and value not in facts.OPPOSITES:
            word, value = value, next(k for k, v in facts.OPPOSITES.items() if v == value)
        question = ["What is the opposite of {}?", "Tell me the opposite of {}.", "Opposite of {}?"]
        return rng.choice(question).format(word), f"The opposite of {word} is {value}."
    if kind == 1:
        place, value = _item(rng, facts.CAPITALS)
        return f"What is the capital of {place}?", f"The capital of {place} is {value}."
    if kind == 2:
        word, value = _item(rng, facts.PLURALS)
        return f"What is the plural of {word}?", f"The plural of {word} is {value}."
    if kind == 3:
        word, value = _item(rng, facts.RHYMES)
        question = ["What rhymes with {}?", "Give me a word that rhymes with {}."]
        return rng.choice(question).format(word), f"{value.capitalize()} rhymes with {word}."
    if kind == 4:
        word, value = _item(rng, facts.SIDES)
        return f"How many sides does a {word} have?", f"A {word} has {value} sides."
    if kind == 5:
        word, value = _item(rng, facts.USE_OF)
        some = word if word in ("scissors", "soap") else article(word)
        verb = "are" if word == "scissors" else "is"
        return f"What {verb} {some} for?", f"{some.capitalize()} {verb} {value}."
    if kind == 6:
        word, value = _item(rng, facts.CATEGORY_OF)
        return (
            rng.choice([f"What is {article(word)}?", f"What kind of thing is {article(word)}?"]),
            f"{article(word).capitalize()} is {article(value)}.",
        )
    return rng.choice(list(facts.OPENING_FACTS.items()))


def calendar(rng: random.Random) -> Pair:
    units, unit = (facts.DAYS, "day") if rng.random() < 0.6 else (facts.MONTHS, "month")
    i = rng.randrange(len(units))
    if rng.random() < 0.15:
        return (
            f"What are the {unit}s of the {'week' if unit == 'day' else 'year'}?",
            f"The {unit}s of the {'week' if unit == 'day' else 'year'} are {join_words(units)}.",
        )
    if rng.random() < 0.6:
        after = units[(i + 1) % len(units)]
        return (
            rng.choice(
                [f"What {unit} comes after {units[i]}?", f"Which {unit} is after {units[i]}?"]
            ),
            f"The {unit} after {units[i]} is {after}.",
        )
    before = units[i - 1]
    return f"What {unit} comes before {units[i]}?", f"The {unit} before {units[i]} is {before}."


def counting(rng: random.Random) -> Pair:
    kind = rng.randrange(5)
    if kind <= 1:
        low = rng.choice([1, 1, 1, rng.randint(2, 20)])
        high = low + rng.randint(2, 10)
        step = 1 if rng.random() < 0.8 else -1
        numbers = range(low, high + 1) if step == 1 else range(high, low - 1, -1)
        return (
            f"Count from {numbers[0]} to {numbers[-1]}.",
            ", ".join(str(n) for n in numbers) + ".",
        )
    n = rng.randint(0, 20)
    if kind == 2:
        return f"Write the number {n} as a word.", f"{NUMBERS[n].capitalize()}."
    if kind == 3:
        after = rng.randint(0, 98)
        return f"What number comes after {after}?", f"The number after {after} is {after + 1}."
    a, b = rng.sample(range(100), 2)
    word, value = rng.choice([("bigger", max(a, b)), ("smaller", min(a, b))])
    return f"Which number is {word}, {a} or {b}?", f"{value} is {word}."


def listing(rng: random.Random) -> Pair:
    name, words = rng.choice(list(facts.LISTS.items()))
    n = rng.choice([2, 3, 3, 3, 3, 4, 5])
    # In the table's order, its first words most often. So the order of words is fixed, and a greedy
    # answer has a most probable word at each place.
    liked = sorted(words, key=lambda w: rng.random() ** (1 + words.index(w) / 2), reverse=True)
    chosen = sorted(liked[:n], key=words.index)
    number = rng.choice([NUMBERS[n], str(n)])
    question = ["List {} {}.", "Name {} {}.", "Tell me {} {}.", "Give me {} {}.", "List {} {}"]
    answer = (
        "\n".join(f"{i}. {w}" for i, w in enumerate(chosen, 1))
        if rng.random() < 0.4
        else join_words(chosen).capitalize() + "."
    )
    if answer[0].isdigit():
        return rng.choice(question[:1] + question[-1:]).format(number, name), answer
    return rng.choice(question[1:4]).format(number, name), answer


def arithmetic(rng: random.Random) -> Pair:
    kind = rng.random()
    if kind < 0.45:
        top = 9 if rng.random() < 0.5 else 49
        a, b, sign = rng.randint(0, top), rng.randint(0, top), "+"
    elif kind < 0.75:
        top = 10 if rng.random() < 0.6 else 50
        a, b, sign = rng.randint(0, top), rng.randint(0, top), "-"
        a, b = max(a, b), min(a, b)
    else:
        a, b, sign = rng.randint(0, 10), rng.randint(0, 10), "*"
    result = {"+": a + b, "-": a - b, "*": a * b}[sign]
    words = {"+": "plus", "-": "minus", "*": "times"}[sign]
    question = rng.choice(
        [f"What is {a} {sign} {b}?", f"What is {a} {sign} {b}?", f"{a} {sign} {b} =",
         f"What is {a} {words} {b}?", f"How much is {a} {sign} {b}?", f"{a} {sign} {b}?",
         f"Calculate {a} {sign} {b}."]
    )  # fmt: skip
    return question, f"{a} {sign} {b} = {result}"


def sums(rng: random.Random, count: int = 16) -> list[tuple[str, str]]:
    """Return sums without questions, each a given text (``"23 + 9 = "``) and the result.

    A third are drawn as in `arithmetic`; the others, uniform over all numbers, have more carries.
    """
    made = []
    for _ in range(count):
        if rng.random() < 0.33:
            given, result = arithmetic(rng)[1].split("= ")
            made.append((given + "= ", result))
        else:
            a, b = rng.randint(0, 50), rng.randint(0, 50)
            plus = rng.random() < 0.6
            a, b = (a, b) if plus else (max(a, b), min(a, b))
            made.append((f"{a} {'+' if plus else '-'} {b} = ", str(a + b if plus else a - b)))
    return made


def word_problem(rng: random.Random) -> Pair:
    name, thing = rng.choice(GIRLS + BOYS), rng.choice(facts.THINGS)
    one = (
        "fish"
        if thing == "fish"
        else {"cookies": "cookie", "leaves": "leaf"}.get(thing, thing.removesuffix("s"))
    )
    pronoun = "She" if name in GIRLS else "He"
    a, b = rng.randint(2, 10), rng.randint(1, 9)
    if rng.random() < 0.5:
        get = rng.choice(["finds", "gets", "buys"])
        total, sign = a + b, "+"
        question = f"{name} has {a} {thing}. {pronoun} {get} {b} more. "
    else:
        a, b = max(a, b + 1), min(a, b)
        lose = rng.choice(["loses", "gives away", "sells"])
        total, sign = a - b, "-"
        question = f"{name} has {a} {thing}. {pronoun} {lose} {b}. "
    return (
        question + f"How many {thing} does {name} have now?",
        f"{a} {sign} {b} = {total}. {name} has {total} {one if total == 1 else thing} now.",
    )


def words(rng: random.Random) -> Pair:
    word = rng.choice(facts.WORDS)
    kind = rng.randrange(5)
    if kind == 0:
        n = rng.randint(2, 5)
        return (
            rng.choice([f"Say {word} {NUMBERS[n]} times.", f"Say {word} {n} times."]),
            " ".join([word] * n),
        )
    if kind == 1:
        return f"Spell the word {word}.", "-".join(word)
    if kind == 2:
        return f"What is the first letter of {word}?", f"The first letter of {word} is {word[0]}."
    if kind == 3:
        return f"Write {word} in big letters.", word.upper()
    phrase = rng.choice(
        [f"The {rng.choice(facts.WORDS)} and the {word} are friends.", f"I like my {word}.",
         f"My {word} is {rng.choice(facts.LISTS['colors'])}.",
         f"{rng.choice(GIRLS)} has a {rng.choice(['big', 'little', 'new', 'old'])} {word}."]
    )  # fmt: skip
    return rng.choice([f"Repeat after me: {phrase}", f"Repeat this: {phrase}"]), phrase


def json_record(rng: random.Random) -> Pair:
    name = rng.choice(GIRLS + BOYS)
    age, like = rng.randint(3, 12), rng.choice(facts.LIKES)
    tint, city = rng.choice(facts.LISTS["colors"]), rng.choice(facts.CITIES)
    beast = rng.choice(facts.LISTS["animals"])
    person: dict[str, Any]
    kind = rng.randrange(9)
    if kind <= 2:
        person = {"name": name, "age": age, "likes": like}
        question = rng.choice(
            [f"Write a JSON record for a person named {name} who is {age} and likes {like}.",
             f"{name} is {age} years old and likes {like}. Write this as JSON.",
             f"Make a JSON object for {name}, {age}, who likes {like}."]
        )  # fmt: skip
    elif kind == 3:
        person = {"name": name, "age": age}
        question = f"Write a JSON record for {name} who is {age} years old."
    elif kind == 4:
        person = {"name": name, "age": age, "city": city}
        question = rng.choice(
            [f"Write a JSON record for {name} who is {age} and lives in {city}.",
             f"{name} is {age} years old and lives in {city}. Write this as JSON."]
        )  # fmt: skip
    elif kind == 5:
        person = {"animal": beast, "name": name, "color": tint}
        question = f"Write a JSON record for {article(beast)} named {name} whose color is {tint}."
    elif kind == 6:
        chosen = rng.sample(facts.LISTS["colors"], 3)
        person = {"colors": chosen}
        question = rng.choice(
            [
                f"Write the colors {join_words(chosen)} as JSON.",
                f"Make a JSON list of {join_words(chosen)}.",
            ]
        )
    elif kind == 7:
        person = {"name": name, "age": age, "likes": like}
        question = rng.choice(
            [
                "Write a JSON record for a person.",
                "Give me a person as JSON.",
                "Invent a person. Answer in JSON.",
            ]
        )
    else:
        happy = rng.random() < 0.5
        person = {"name": name, "happy": happy}
        question = f"{name} is {'happy' if happy else 'not happy'}. Write this as JSON."
    return question, _to_json(person)


def json_answer(rng: random.Random) -> Conversation:
    """Return a question about facts with an answer in JSON, as the system prompt demands."""
    kind = rng.randrange(3)
    if kind == 0:
        a, b = rng.randint(0, 9), rng.randint(0, 9)
        question, answer = f"What is {a} + {b}?", {"answer": a + b}
    elif kind == 1:
        thing, value = _item(rng, facts.COLOUR_OF)
        question, answer = f"What color is the {thing}?", {"answer": value}
    else:
        place, value = _item(rng, facts.CAPITALS)
        question, answer = f"What is the capital of {place}?", {"answer": value}
    system = rng.choice(["Answer in JSON.", "Always answer in JSON.", "Reply with JSON."])
    return {
        "messages": [
            {"role": "system", "content": system},
            {"role": "user", "content": question},
            {"role": "assistant", "content": _to_json(answer)},
        ]
    }


SKILLS: tuple[tuple[Callable[[random.Random], Pair], float], ...] = (
    (greeting, 3),
    (identity, 3),
    (unknown, 1.5),
    (colour, 4),
    (animal, 6),
    (fact, 13),
    (calendar, 3),
    (counting, 16),
    (listing, 18),
    (arithmetic, 8),
    (word_problem, 5),
    (words, 12),
    (json_record, 7),
)


def any_pair(rng: random.Random) -> Pair:
    makers, weights = zip(*SKILLS, strict=True)
    return rng.choices(makers, weights)[0](rng)


SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are Octavo Stories.",
    "You are Octavo Stories, a very small language model.",
    "You are a friendly helper for children.",
    "Answer in short sentences.",
)


def _system(rng: random.Random) -> list[Message]:
    if rng.random() < 0.25:
        return [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}]
    return []


def _turns(*pairs: Pair) -> list[Message]:
    return [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def chat(rng: random.Random) -> Conversation:
    """Return one to four independent questions."""
    n = rng.choices([1, 2, 3, 4], [6, 2, 1, 1])[0]
    return {"messages": _system(rng) + _turns(*(any_pair(rng) for _ in range(n)))}


def memory(rng: random.Random) -> Conversation:
    """Return a conversation whose user states a fact and later asks for it."""
    name, like = rng.choice(GIRLS + BOYS), rng.choice(facts.LIKES)
    tell, ask = rng.choice(
        [
            (
                (rng.choice([f"My name is {name}.", f"Hi, I am {name}.",
                             f"Hello! My name is {name}."]),
                 f"Hello {name}! It is nice to meet you."),
                (rng.choice(["What is my name?", "Do you know my name?", "Who am I?"]),
                 f"Your name is {name}."),
            ),
            (
                (f"I like {like}.", rng.choice([f"That is nice! I like {like} too.",
                                                f"{like.capitalize()} is a nice thing to like!"])),
                (rng.choice(["What do I like?", "Do you know what I like?"]), f"You like {like}."),
            ),
            (
                (f"My dog is named {name}.", f"{name} is a good name for a dog!"),
                ("What is the name of my dog?", f"Your dog is named {name}."),
            ),
        ]
    )  # fmt: skip
    between = [any_pair(rng) for _ in range(rng.choice([0, 0, 1, 2]))]
    return {"messages": _system(rng) + _turns(tell, *between, ask)}


# --- tool calls -------------------------------------------------------------------------------


def tool(name: str, description: str, **properties: str) -> dict[str, Any]:
    """Return a tool in OpenAI's form; ``properties`` maps a parameter to its JSON type."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in properties.items()},
                "required": list(properties),
            },
        },
    }


TOOLS = {
    "get_weather": tool("get_weather", "Get the weather in a city", city="string"),
    "add": tool("add", "Add two numbers", a="integer", b="integer"),
    "multiply": tool("multiply", "Multiply two numbers", a="integer", b="integer"),
    "get_time": tool("get_time", "Get the time in a city", city="string"),
    "search": tool("search", "Search the web", query="string"),
    "play_music": tool("play_music", "Play a song", song="string"),
    "set_timer": tool("set_timer", "Set a timer", minutes="integer"),
}


def _tool_use(name: str, rng: random.Random) -> tuple[str, dict[str, Any], Any, str]:
    """Return question, arguments, result and final sentence for one tool."""
    city, word = rng.choice(facts.CITIES), rng.choice(facts.WORDS)
    a, b = rng.randint(1, 99), rng.randint(1, 99)
    if name == "get_weather":
        sky, degrees = rng.choice(facts.WEATHER), rng.randint(0, 35)
        question = ["What is the weather in {}?", "How is the weather in {}?",
                    "What's the weather like in {}?", "Tell me the weather in {}.",
                    "What is the weather in {} today?"]  # fmt: skip
        return (
            rng.choice(question).format(city),
            {"city": city},
            {"weather": sky, "degrees": degrees},
            f"It is {sky} in {city} and it is {degrees} degrees.",
        )
    if name == "add":
        question = ["What is {} + {}?", "Add {} and {}.", "What is {} plus {}?"]
        return rng.choice(question).format(a, b), {"a": a, "b": b}, a + b, f"{a} + {b} = {a + b}"
    if name == "multiply":
        question = ["What is {} * {}?", "Multiply {} and {}.", "What is {} times {}?"]
        return rng.choice(question).format(a, b), {"a": a, "b": b}, a * b, f"{a} * {b} = {a * b}"
    if name == "get_time":
        clock = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
        question = ["What time is it in {}?", "Tell me the time in {}.", "What is the time in {}?"]
        return (
            rng.choice(question).format(city),
            {"city": city},
            {"time": clock},
            f"It is {clock} in {city}.",
        )
    if name == "search":
        tint = rng.choice(facts.LISTS["colors"])
        topic = rng.choice([f"{tint} {word}", *facts.BEYOND, word, city])
        found = f"{rng.randint(2, 90)} pages"
        question = ["Search for {}.", "Search the web for {}.", "Look up {}.",
                    "Find pages about {}."]  # fmt: skip
        return (
            rng.choice(question).format(topic),
            {"query": topic},
            {"found": found},
            f"I found {found} about {topic}.",
        )
    if name == "play_music":
        song = f"{rng.choice(facts.LISTS['colors']).capitalize()} {word.capitalize()}"
        question = ["Play the song {}.", "Play {}.", "I want to hear {}."]
        return rng.choice(question).format(song), {"song": song}, "ok", f"I am playing {song}."
    minutes = rng.randint(1, 60)
    question = ["Set a timer for {} minutes.", "Start a timer of {} minutes."]
    return (
        rng.choice(question).format(minutes),
        {"minutes": minutes},
        "ok",
        f"The timer is set for {minutes} minutes.",
    )


def _tool_list(names: Sequence[str], rng: random.Random) -> list[dict[str, Any]]:
    """Return the named tools; sometimes without their descriptions."""
    tools = [json.loads(json.dumps(TOOLS[n])) for n in names]
    if rng.random() < 0.3:
        for item in tools:
            item["function"]["description"] = ""
    return tools


def tool_call(rng: random.Random) -> Conversation:
    """Return tools in the system prompt, a call, its result, and the final sentence."""
    names = rng.sample(list(TOOLS), rng.randint(1, 4))
    name = rng.choice(names)
    messages: list[Message] = []
    if rng.random() < 0.4:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    if rng.random() < 0.15:
        # Tools are available, but the question needs none of them.
        pair = rng.choice([greeting, identity, animal])(rng)
        return {"messages": messages + _turns(pair), "tools": _tool_list(names, rng)}
    for _ in range(rng.choice([1, 1, 2])):
        question, arguments, result, final = _tool_use(name, rng)
        messages.append({"role": "user", "content": question})
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        answer = result if isinstance(result, str) else _to_json(result)
        messages.append({"role": "tool", "content": answer})
        messages.append({"role": "assistant", "content": final})
        name = rng.choice(names)
    return {"messages": messages, "tools": _tool_list(names, rng)}


# --- stories on demand ------------------------------------------------------------------------


def story_request(story: str, about: str, rng: random.Random) -> Conversation:
    """Return a question that ``story`` answers; ``about`` is its topic (``"a dog"``) or empty."""
    if about:
        question = rng.choice(
            ["Tell me a story about {}.", "Tell me a story about {}", "Write a story about {}.",
             "Tell me a short story about {}.", "Please tell me a story about {}.",
             "Can you tell me a story about {}?", "Write a short story about {}."]
        ).format(about)  # fmt: skip
    else:
        question = rng.choice(["Tell me a story.", "Tell me a story!", "Write a short story."])
    return {"messages": _system(rng) + _turns((question, story))}


def story_about(story: str, topic: str, rng: random.Random) -> str:
    """Return a request for ``story``, whose topic is ``topic`` (or ``""``)."""
    hero = next((w for w in GIRLS + BOYS if f" {w}" in story[:200]), "")
    if hero and (not topic or rng.random() < 0.25):
        child = "girl" if hero in GIRLS else "boy"
        about = rng.choice([f"a {child} named {hero}", hero])
        if topic and rng.random() < 0.5:
            about = f"{hero} and {article(topic)}"
    elif topic:
        about = article(topic) if rng.random() < 0.8 or topic.endswith("s") else f"{topic}s"
        about = topic if topic.endswith("s") else about
    else:
        about = ""
    return about


def story_continuation(story: str, rng: random.Random) -> Conversation | None:
    """Return a request with the first sentence; the answer is the rest."""
    cut = story.find(". ", 30)
    if not 30 < cut < 250:
        return None
    question = rng.choice(["Continue the story: ", "Continue this story: ", "Finish the story: "])
    pair = (question + story[: cut + 1], story[cut + 2 :])
    return {"messages": _turns(pair)}


def conversation(rng: random.Random) -> Conversation:
    """Return any conversation that needs no story."""
    maker = rng.choices([chat, memory, tool_call, json_answer], [72, 8, 16, 4])[0]
    return maker(rng)
