"""Tables of small facts from which ``synthetic.py`` makes questions and answers."""
# ruff: noqa: SIM905

from __future__ import annotations


def _pairs(text: str) -> dict[str, str]:
    """Parse ``"a=b, c=d"`` as a dictionary."""
    return dict(item.strip().split("=") for item in text.replace("\n", " ").split(","))


COLOUR_OF = _pairs(
    """sky=blue, grass=green, sun=yellow, snow=white, banana=yellow, strawberry=red, carrot=orange,
    coal=black, leaf=green, lemon=yellow, cherry=red, tomato=red, milk=white, chocolate=brown,
    pumpkin=orange, pig=pink, frog=green, crow=black, cloud=white, fire truck=red, blood=red,
    sea=blue, cucumber=green, swan=white, fox=orange, elephant=grey, mouse=grey, bear=brown,
    night sky=black, flamingo=pink, polar bear=white, pea=green, corn=yellow, plum=purple"""
)
SOUND_OF = _pairs(
    """dog=woof, cat=meow, cow=moo, duck=quack, sheep=baa, pig=oink, horse=neigh, lion=roar,
    mouse=squeak, bee=buzz, owl=hoot, snake=hiss, rooster=cock-a-doodle-doo, frog=ribbit,
    wolf=howl, bird=tweet, goat=maa, hen=cluck, crow=caw, bear=growl, donkey=hee-haw"""
)
BABY_OF = _pairs(
    """dog=puppy, cat=kitten, cow=calf, horse=foal, sheep=lamb, duck=duckling, bear=cub, lion=cub,
    pig=piglet, hen=chick, frog=tadpole, goat=kid, deer=fawn, kangaroo=joey, owl=owlet,
    goose=gosling, elephant=calf, rabbit=bunny, swan=cygnet, whale=calf"""
)
HOME_OF = _pairs(
    """fish=in the water, bird=in a nest, bee=in a hive, bear=in a cave, rabbit=in a burrow,
    spider=in a web, dog=in a house, cow=on a farm, lion=in the savanna, frog=in a pond,
    monkey=in the jungle, whale=in the sea, penguin=at the South Pole, camel=in the desert,
    fox=in a den, ant=in an anthill, owl=in a tree, pig=on a farm, horse=in a stable,
    shark=in the sea, squirrel=in a tree, polar bear=at the North Pole, mouse=in a hole"""
)
LEGS_OF = _pairs(
    """dog=four, cat=four, bird=two, spider=eight, ant=six, bee=six, horse=four, chicken=two,
    cow=four, fish=no, snake=no, butterfly=six, duck=two, elephant=four, pig=four, octopus=no"""
)
EATS = _pairs(
    """rabbit=carrots, cow=grass, monkey=bananas, mouse=cheese, horse=hay, panda=bamboo, bear=honey,
    squirrel=nuts, lion=meat, bird=seeds, cat=fish, dog=bones, koala=leaves, frog=flies,
    sheep=grass, elephant=leaves, penguin=fish, duck=bread, goat=grass, shark=fish"""
)
OPPOSITES = _pairs(
    """big=small, hot=cold, up=down, happy=sad, fast=slow, day=night, old=young, tall=short,
    light=dark, hard=soft, wet=dry, full=empty, open=closed, good=bad, clean=dirty, near=far,
    loud=quiet, rich=poor, strong=weak, thick=thin, early=late, left=right, in=out, on=off,
    yes=no, black=white, first=last, high=low, wide=narrow, heavy=light, easy=difficult,
    long=short, brave=afraid, love=hate, win=lose, start=stop, front=back, push=pull, sweet=sour,
    awake=asleep, same=different, warm=cool, deep=shallow, kind=mean, over=under, new=old,
    come=go, give=take, true=false, inside=outside, above=below, begin=end, laugh=cry,
    friend=enemy, remember=forget, find=lose, rough=smooth, noisy=quiet, north=south, east=west"""
)
CAPITALS = _pairs(
    """France=Paris, England=London, Italy=Rome, Spain=Madrid, Germany=Berlin, Japan=Tokyo,
    China=Beijing, Russia=Moscow, Egypt=Cairo, Greece=Athens, Portugal=Lisbon, Ireland=Dublin,
    Austria=Vienna, Poland=Warsaw, Norway=Oslo, Sweden=Stockholm, India=New Delhi, Canada=Ottawa,
    Mexico=Mexico City, Turkey=Ankara, Cuba=Havana, Peru=Lima, Kenya=Nairobi, Finland=Helsinki"""
)
PLURALS = _pairs(
    """cat=cats, dog=dogs, mouse=mice, child=children, foot=feet, tooth=teeth, man=men, box=boxes,
    woman=women, leaf=leaves, sheep=sheep, fish=fish, goose=geese, baby=babies, bus=buses,
    tree=trees, car=cars, toy=toys, berry=berries, wolf=wolves, book=books, star=stars,
    knife=knives, puppy=puppies, egg=eggs, fox=foxes, apple=apples, cherry=cherries"""
)
RHYMES = _pairs(
    """cat=hat, dog=frog, sun=fun, tree=bee, car=star, house=mouse, cake=lake, light=night,
    ball=tall, king=ring, moon=spoon, bear=chair, book=cook, day=play, rain=train, boat=goat,
    bed=red, fox=box, hen=pen, pig=wig, bug=hug, nose=rose, fish=dish, snail=tail, clock=rock,
    man=pan"""
)
SIDES = _pairs("triangle=three, square=four, rectangle=four, pentagon=five, hexagon=six, circle=no")
MIX = _pairs(
    """red and yellow=orange, blue and yellow=green, red and blue=purple, black and white=grey,
    red and white=pink, yellow and red=orange, yellow and blue=green, blue and red=purple,
    white and black=grey, white and red=pink"""
)
USE_OF = _pairs(
    """umbrella=to stay dry in the rain, bed=to sleep, pencil=to write, spoon=to eat soup,
    knife=to cut, soap=to wash, key=to open a door, clock=to tell the time, boat=to sail,
    book=to read, lamp=to see in the dark, cup=to drink, broom=to sweep the floor,
    hammer=to hit nails, scissors=to cut paper, coat=to stay warm, phone=to call people,
    map=to find the way, ladder=to climb, bag=to carry things, kettle=to boil water"""
)
OPENING_FACTS = {
    "Why do we sleep?": "We sleep so that our body can rest.",
    "Why do birds sing?": "Birds sing to talk to each other.",
    "Where does rain come from?": "Rain comes from the clouds.",
    "What is the moon?": "The moon is a big ball of rock that goes around the Earth.",
    "What is the sun?": "The sun is a star. It is very big and very hot.",
    "Where does milk come from?": "Milk comes from cows.",
    "Where do eggs come from?": "Eggs come from hens.",
    "Who makes honey?": "Bees make honey.",
    "Where does bread come from?": "Bread is made from flour, and flour is made from wheat.",
    "What is ice?": "Ice is frozen water.",
    "What is snow?": "Snow is frozen water that falls from the clouds.",
    "Can fish fly?": "No, most fish can not fly. Fish swim in the water.",
    "Can birds fly?": "Yes, most birds can fly.",
    "Can a penguin fly?": "No, a penguin can not fly, but it can swim very well.",
    "Can cats climb trees?": "Yes, cats can climb trees.",
    "Is the Earth round?": "Yes, the Earth is round.",
    "Is fire hot?": "Yes, fire is very hot. Do not touch it!",
    "Is ice cold?": "Yes, ice is very cold.",
    "How many days are in a week?": "There are seven days in a week.",
    "How many months are in a year?": "There are twelve months in a year.",
    "How many hours are in a day?": "There are twenty-four hours in a day.",
    "How many minutes are in an hour?": "There are sixty minutes in an hour.",
    "How many fingers do I have?": "You have ten fingers.",
    "How many colors are in a rainbow?": "There are seven colors in a rainbow.",
    "How many letters are in the alphabet?": "There are twenty-six letters in the alphabet.",
    "What is the biggest animal?": "The biggest animal is the blue whale.",
    "What is the fastest animal?": "The fastest animal on land is the cheetah.",
    "What is the tallest animal?": "The tallest animal is the giraffe.",
    "What do plants need?": "Plants need water, light and air.",
    "What do we breathe?": "We breathe air.",
    "What do you do when you are tired?": "When you are tired, you should rest.",
    "What do you do when you are thirsty?": "When you are thirsty, you drink water.",
    "What do you do when you are hungry?": "When you are hungry, you eat food.",
    "What do you wear when it is cold?": "When it is cold, you wear a warm coat.",
    "What is the largest planet?": "The largest planet is Jupiter.",
    "Which planet do we live on?": "We live on the planet Earth.",
    "What is the largest ocean?": "The largest ocean is the Pacific Ocean.",
    "What season is the coldest?": "Winter is the coldest season.",
    "What season is the hottest?": "Summer is the hottest season.",
    "What comes after winter?": "Spring comes after winter.",
    "What is water made of?": "Water is made of hydrogen and oxygen.",
}
LISTS: dict[str, list[str]] = {
    name: words.split()
    for name, words in {
        "animals": "dog cat cow horse lion bear rabbit fox mouse elephant monkey frog sheep duck",
        "colors": "red blue green yellow orange purple pink white black brown grey",
        "fruits": "apple banana pear orange grape cherry plum peach lemon strawberry mango",
        "vegetables": "carrot potato tomato pea onion corn cabbage bean pumpkin cucumber",
        "toys": "ball doll kite car truck train puzzle robot blocks drum teddy",
        "birds": "owl duck crow swan robin eagle parrot pigeon hen goose penguin",
        "farm animals": "cow pig horse sheep hen goat duck donkey goose",
        "sea animals": "fish whale shark crab octopus dolphin seal turtle starfish",
        "things in a kitchen": "spoon cup plate pot pan knife fork bowl oven kettle",
        "shapes": "circle square triangle star heart rectangle oval",
        "insects": "bee ant fly butterfly beetle ladybug moth cricket",
        "drinks": "water milk juice tea lemonade cocoa",
        "things in the sky": "sun moon star cloud bird kite rainbow plane",
        "clothes": "hat coat shirt sock shoe dress scarf glove sweater",
        "body parts": "hand foot nose ear eye mouth arm leg knee head",
    }.items()
}
CATEGORY_OF = {
    word: singular
    for name, singular in (
        ("fruits", "fruit"),
        ("vegetables", "vegetable"),
        ("colors", "color"),
        ("toys", "toy"),
        ("birds", "bird"),
        ("insects", "insect"),
        ("shapes", "shape"),
        ("drinks", "drink"),
    )
    for word in LISTS[name]
    if word != "orange"
}
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December"
).split()
NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
    " sixteen seventeen eighteen nineteen twenty"
).split()
THINGS = (
    "apples balls books cookies stars stones flowers toys shells eggs coins pencils cakes"
    " balloons birds fish buttons cups hats leaves"
).split()
LIKES = (
    "cats dogs horses books music football cake trains stars flowers robots dinosaurs trees boats"
    " apples birds fish ice-cream swimming drawing singing dancing kites puzzles rabbits frogs"
).split()
CITIES = (
    "Paris London Rome Madrid Berlin Tokyo Moscow Cairo Athens Lisbon Dublin Vienna Oslo Boston"
    " Chicago Sydney Prague Warsaw Seattle Toronto Zurich Milan Munich Lyon Delhi Beijing"
).split()
WEATHER = "sunny rainy cloudy windy snowy foggy stormy".split()
JOBS = "teacher doctor farmer baker painter pilot nurse singer cook driver builder".split()
WORDS = (
    "cat dog sun tree book house star apple milk water happy green little friend garden river"
    " moon bird chair table flower bread smile king queen castle dragon train boat school"
).split()
BEYOND = (
    "quantum physics", "the stock market", "politics", "calculus", "the law of taxes",
    "computer chips", "chemistry", "philosophy", "economics", "the Roman Empire", "black holes",
    "rocket engines", "surgery", "cryptography", "machine learning", "the history of art",
)  # fmt: skip
