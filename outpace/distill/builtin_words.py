"""The words of the built-in prompts: topics, tasks, passages, and the templates that they are put into."""

from __future__ import annotations


def _split(text: str) -> tuple[str, ...]:
    """Entries are set apart by semicolons."""
    return tuple(" ".join(entry.split()) for entry in text.split(";") if entry.strip())


TOPICS = _split("""
    photosynthesis; volcanoes; black holes; the water cycle; vaccines; gravity; the human heart; plate tectonics; DNA;
    electric motors; the speed of light; antibiotics; rainbows; tides; sleep; the immune system; lightning; magnets;
    evolution; the periodic table; solar panels; nuclear fusion; enzymes; sound waves; the greenhouse effect; erosion;
    neurons; batteries; lasers; radio; the Moon; comets; coral reefs; rainforests; deserts; glaciers; bees; whales;
    owls; spiders; dolphins; mushrooms; oak trees; wolves; migration of birds; the food chain; endangered species;
    compost; the Roman Empire; the Silk Road; the printing press; the French Revolution; ancient Egypt; the Industrial
    Revolution; the Renaissance; the Cold War; the Space Race; the Magna Carta; the Black Death; feudalism; the
    Aztecs; the Vikings; the fall of the Berlin Wall; the Great Depression; women's suffrage; the Enlightenment; the
    Ottoman Empire; samurai; democracy; human rights; the United Nations; taxes; inflation; supply and demand;
    interest rates; the stock market; budgeting; insurance; free trade; minimum wage; entrepreneurship; marketing;
    supply chains; monopolies; pensions; Shakespeare's plays; haiku; jazz; opera; impressionism; cubism; photography;
    film noir; ballet; street art; origami; the novel; fairy tales; satire; folk music; the guitar; the piano; chess;
    football; marathon running; yoga; swimming; cycling; rock climbing; tennis; basketball; bread baking;
    fermentation; olive oil; coffee; tea; chocolate; cheese; spices; sushi; pasta; vegetarian cooking; gardening;
    knitting; woodworking; pottery; camping; sailing; bird watching; time management; public speaking; learning a
    language; remote work; job interviews; teamwork; leadership; stress; meditation; friendship; empathy;
    procrastination; creativity; critical thinking; memory techniques; note taking; machine learning; neural networks;
    databases; operating systems; encryption; the internet; blockchain; compilers; cloud computing; robots; version
    control; recursion; hash tables; sorting algorithms; binary search; linked lists; object-oriented programming;
    unit testing; regular expressions; web browsers; search engines; quantum computers; prime numbers; fractions;
    probability; calculus; the Pythagorean theorem; statistics; logarithms; geometry; algebra; matrices; infinity;
    game theory; graph theory; stoicism; utilitarianism; free will; existentialism; logic; ethics of technology;
    Japan; Brazil; Kenya; Iceland; India; Egypt; Canada; Italy; Morocco; New Zealand; Venice; the Alps; the Amazon;
    the Sahara; the Great Barrier Reef; electric cars; trains; bridges; airports; bicycles in cities; skyscrapers;
    recycling; wind energy; drinking water; public libraries; museums; school uniforms; homework; exams
""")
ABOUT = _split("""
    What should everybody know about {0}?; Explain {0} to a ten-year-old.; Tell me about {0}.; Write a short essay
    about {0}.; Give me five interesting facts about {0}.; What are the most common misconceptions about {0}?; Write a
    paragraph about {0} for a school newspaper.; Why should I care about {0}?; Write a quiz with four questions on {0}
    and give the answers.; Summarize the history of {0} in a few sentences.; Write a short poem about {0}.; How would
    you introduce {0} in a lesson? Give an outline.; Write a dialogue between a teacher and a student about {0}.; What
    are the advantages and disadvantages of {0}?; Explain {0} with an analogy from everyday life.; I have to give a
    talk about {0}. Can you help me to plan it?; Describe {0} in exactly three sentences.; What questions about {0}
    are still open?; Write a blog post about {0}.; Hi! I know nothing about {0}. Where should I start?; What has
    changed in the last hundred years when it comes to {0}?; Argue for and against this claim: people make too much of
    {0}.
""")
THINGS = _split("""
    healthy breakfasts; books for a long journey; names for a cat; indoor plants; rainy day activities; board games;
    ways to save energy at home; gifts under twenty dollars; European capitals; musical instruments; kinds of clouds;
    programming languages; historical inventions; team games for children; soups; questions for a first meeting; words
    that rhyme with light; animals that live in cold places; sources of protein; exercises without equipment; things
    to pack for a hike; ideas for a science fair; famous painters; tips for better sleep; habits of good writers;
    synonyms for happy; tools every kitchen needs; careers in science; national parks; desserts with apples; proverbs;
    steps to plan a wedding; mistakes of new drivers; ways to greet someone; rivers in Africa; fruits that are not
    sweet
""")
LISTS = _split("""
    List ten {0}.; Give me a numbered list of {0} with one sentence each.; Name five {0}.; Can you suggest some {0}?;
    Make a table of {0} with a column for a short comment.; What are good examples of {0}? Use bullet points.
""")
OCCASIONS = _split("""
    asking for a day off; a late delivery; moving to a new flat; thanking a teacher; a lost suitcase; a school
    reunion; inviting friends to dinner; a broken washing machine; applying for an internship; a noisy neighbour; a
    new puppy; resigning from a job; a charity run; opening a bakery; a delayed project; a wrong invoice; a birthday
    party; a trip to the mountains; a lighthouse keeper; a lost letter; a robot who learns to paint; two rival chefs;
    the last tree in a city; a train that never stops; a dragon who is afraid of fire; a mysterious key; an honest
    thief; a storm at sea; a clockmaker; the first day at school; a library at night; a visit to grandmother; a
    village without mirrors
""")
WRITING = _split("""
    Write an email about {0}.; Write a short story about {0}.; Write the opening paragraph of a novel about {0}.;
    Write a formal letter concerning {0}.; Compose a friendly message about {0}.; Write a scene with dialogue about
    {0}.; Write a poem of eight lines about {0}.; Draft a social media post about {0}.; Write a diary entry about {0}.
""")
ROLES = _split("""
    a ship's captain; a museum guide; a doctor; a chef; a detective; a travel agent; a librarian; a football coach; a
    judge; a time traveller; a farmer; a philosopher of ancient Greece; an astronaut; a gardener; a firefighter; a
    financial adviser; a talking tree; a medieval knight; a weather presenter; a sceptical journalist; a tailor; a
    vet; a physics teacher; an architect; a stage magician; a software tester; a mountain guide; a mayor; an inventor;
    a pirate
""")
ROLE_PLAY = _split("""
    Imagine you are {0}. Describe your day.; You are {0}. A child asks what you do. Answer in character.; Pretend to
    be {0} and give me advice about making hard decisions.; Take the role of {0} and tell me about the greatest
    mistake of your life.; Play {0} who is interviewed for a newspaper. Write questions and answers.; Act as {0}. I
    will ask you for help: I do not know how to start my project.
""")
TASKS = _split("""
    reverses a string; checks whether a number is prime; finds the largest value in a list; counts the vowels in a
    text; sorts a list by length of its words; removes duplicates from a list; computes the factorial of a number;
    checks whether a word is a palindrome; merges two sorted lists; converts Celsius to Fahrenheit; prints the
    Fibonacci numbers; finds the second smallest number; rotates a list; counts how often each word occurs; checks for
    balanced brackets; finds the common elements of two lists; sums the digits of a number; flattens a nested list;
    converts a number to binary; finds the longest word in a sentence; validates an email address; reads a file line
    by line; computes the average of numbers; implements a stack; implements a queue; searches in a sorted list;
    transposes a matrix; finds the greatest common divisor; capitalizes every word; checks whether two words are
    anagrams; groups items by their first letter; generates a random password; parses a date; finds missing numbers in
    a range; swaps two variables; counts lines in a file; computes compound interest; removes punctuation; zips two
    lists; draws a triangle
""")
CODING = _split("""
    Write a Python function that {0}.; Write a JavaScript function that {0}.; Write a program in C++ that {0}.; Write
    a Java method that {0}.; Write Python code that {0}, and explain it step by step.; Write a Go function that {0}.;
    Write a Python program that {0}. Include comments.; Write a function in Rust that {0}.; Give me an algorithm that
    {0} and state its time complexity.; Write a Python class with a method that {0}.; Write a C# method that {0}.;
    Write a Ruby function that {0}.; Write pseudocode for a function that {0}.
""")
FUNCTIONS = (
    ("add_all", "numbers: list", "Return the sum of all numbers.", "add_all([1, 2, 3])\n    6"),
    ("is_even", "n: int", "Return True if n is even.", "is_even(4)\n    True"),
    ("longest", "words: list", "Return the longest word, the first one on a tie.", "longest(['a', 'bcd'])\n    'bcd'"),
    ("count_char", "text: str, char: str", "Count how often char occurs in text.", "count_char('abba', 'b')\n    2"),
    ("squares", "n: int", "Return the squares of 1 to n.", "squares(3)\n    [1, 4, 9]"),
    ("clamp", "x, low, high", "Limit x to the range from low to high.", "clamp(12, 0, 10)\n    10"),
    (
        "running_max",
        "values: list",
        "Return the largest value so far at each place.",
        "running_max([1, 3, 2])\n    [1, 3, 3]",
    ),
    ("to_roman", "n: int", "Convert n to Roman numerals.", "to_roman(4)\n    'IV'"),
    (
        "chunk",
        "items: list, size: int",
        "Split items into lists of the given size.",
        "chunk([1, 2, 3], 2)\n    [[1, 2], [3]]",
    ),
    ("without", "items: list, item", "Return items without any copy of item.", "without([1, 2, 1], 1)\n    [2]"),
    ("depth", "text: str", "Return the deepest nesting of round brackets.", "depth('(()())')\n    2"),
    ("digits", "n: int", "Return the digits of n as a list.", "digits(305)\n    [3, 0, 5]"),
    ("median", "values: list", "Return the median of values.", "median([3, 1, 2])\n    2"),
    ("caesar", "text: str, shift: int", "Shift every letter of text by shift places.", "caesar('abc', 1)\n    'bcd'"),
    ("divisors", "n: int", "Return all divisors of n in rising order.", "divisors(6)\n    [1, 2, 3, 6]"),
    ("initials", "name: str", "Return the initials of a full name.", "initials('Ada Lovelace')\n    'AL'"),
    (
        "interleave",
        "first: list, second: list",
        "Take items from both in turn.",
        "interleave([1, 3], [2, 4])\n    [1, 2, 3, 4]",
    ),
    ("is_sorted", "values: list", "Return True if values never fall.", "is_sorted([1, 2, 2])\n    True"),
    ("most_common", "items: list", "Return the item that occurs most often.", "most_common(['x', 'y', 'x'])\n    'x'"),
    ("invert", "table: dict", "Swap keys and values.", "invert({'a': 1})\n    {1: 'a'}"),
    ("steps_to_one", "n: int", "Count Collatz steps until n reaches 1.", "steps_to_one(4)\n    2"),
    ("hamming", "a: str, b: str", "Count the places where a and b differ.", "hamming('cat', 'cut')\n    1"),
    (
        "pairs_with_sum",
        "values: list, goal: int",
        "Return all pairs that add up to goal.",
        "pairs_with_sum([1, 2, 3], 4)\n    [(1, 3)]",
    ),
    ("snake_case", "name: str", "Turn a camel case name into snake case.", "snake_case('userName')\n    'user_name'"),
)
PASSAGES = _split("""
    The old mill by the river had stood empty for thirty years when Tomas bought it. He repaired the wheel, painted
    the doors blue and began to grind flour for the three bakeries of the town. Within two years he employed six
    people.; Honey bees tell each other where flowers are by dancing. The angle of the dance gives the direction
    relative to the sun, and its length tells the distance. Other bees follow the dancer in the dark hive and then fly
    out.; The city council voted nine to four for the new tram line. Work starts in March and should take eighteen
    months. The line will cost 240 million and carry about thirty thousand passengers a day. Shop owners fear noise
    and dust.; Maria Olsen, 34, works as a nurse in Bergen. She plays the violin in an amateur orchestra, speaks four
    languages and is training for her second marathon. Her brother Erik, 29, runs a small bicycle shop in Oslo.; Glass
    is made by melting sand, soda and lime at about 1500 degrees. It is then shaped by blowing, pressing or floating
    it on molten tin. Recycled glass melts at a lower temperature, which saves energy.; Sales rose by twelve percent
    in the first quarter and fell by three percent in the second. The management blames late deliveries from two
    suppliers, and expects a better autumn thanks to a new warehouse in Lyon.; When the lights went out, nobody moved.
    Then someone laughed, a match was struck, and the party went on by candle light. Years later they all remembered
    that evening better than any other.; Tea came to Europe in the early seventeenth century. At first it was sold as
    a medicine. Within a hundred years it had become the daily drink of rich and poor in England, and the taxes on it
    helped to start a revolution.
""")
READING = _split("""
    Summarize this text in one sentence: {0}; What is the main point of the following text? {0}; List all names,
    places and numbers in this text: {0}; Rewrite this text for a child: {0}; Write three questions about this text
    and answer them: {0}; Continue this text: {0}; Give this text a title and explain your choice: {0}; Make the
    following text sound more formal: {0}; Turn this text into bullet points: {0}; Extract the facts below as JSON:
    {0}
""")
SENTENCES = _split("""
    The train leaves at seven in the morning.; Could you tell me where the museum is?; We have not seen each other for
    years.; The weather will be better tomorrow.; She bought three apples and a loaf of bread.; I would like to book a
    table for two.; The children are playing in the garden.; He forgot his umbrella on the bus.; Our neighbours are
    moving to the coast.; The meeting was postponed until Friday.; Knowledge is the only treasure that grows when it
    is shared.; My brother has been working as a teacher since last autumn.; The bridge was built more than two
    hundred years ago.; If it rains, we will stay at home and read.; Many people drink coffee in the morning.; The
    company wants to open a new office in the north.; Please turn off the light when you leave.; The book was better
    than the film.
""")
LANGUAGES = ("German", "French", "Spanish", "Italian", "Portuguese", "Dutch", "Chinese", "Japanese", "Russian")
ELSEWHERE = (
    (
        _split("""
            der Mond; die Bienen; das Fahrrad; der Winter; die Demokratie; das Brot; Berlin; der Wald; das Internet;
            die Musik; der Regen; die Freundschaft; ein alter Leuchtturm; Bücher
        """),
        _split("""
            Schreibe einen kurzen Text zum Thema: {0}.; Nenne fünf Tatsachen zum Thema: {0}.; Schreibe ein kurzes
            Gedicht. Thema: {0}.; Erzähle eine kleine Geschichte. Es geht um: {0}.
        """),
    ),
    (
        _split("""
            la mer; le pain; les volcans; Paris; la lune; la photographie; les abeilles; le vélo; la démocratie; un
            vieux château; la cuisine; les rêves; le temps; la musique
        """),
        _split("""
            Écris un court texte sur ce thème : {0}.; Donne cinq faits intéressants. Thème : {0}.; Écris un poème sur
            ce thème : {0}.; Raconte une petite histoire. Sujet : {0}.
        """),
    ),
    (
        _split("""
            el mar; los volcanes; la luna; el café; Madrid; la amistad; las abejas; el invierno; la música; un viejo
            faro; la democracia; el pan; los sueños; el tiempo
        """),
        _split("""
            Escribe un texto breve sobre {0}.; Dame cinco datos interesantes sobre {0}.; Escribe un poema sobre {0}.;
            Cuenta una pequeña historia sobre {0}.
        """),
    ),
    (
        _split("""
            il mare; la luna; i vulcani; Roma; il pane; l'amicizia; la musica; l'inverno; il caffè; il tempo
        """),
        _split("""
            Scrivi un breve testo su questo tema: {0}.; Elenca cinque fatti. Tema: {0}.; Scrivi una poesia su questo
            tema: {0}.
        """),
    ),
)
SUMS = _split("""
    {0} has {2} boxes with {3} pencils each and gives {4} pencils to {1}. How many pencils does {0} have left?; A
    ticket costs {2} dollars. {0} buys {3} tickets and {1} buys {4}. How much do they pay together?; {0} reads {2}
    pages a day and {1} reads {3} pages a day. How many pages do both read in {4} days?; {0} earns {2} dollars an hour
    and works {3} hours a day. How much does {0} earn in {4} days?; A garden is {2} meters long and {3} meters wide.
    What are its area and its perimeter?; {0} is {2} years old. {1} is {3} years older. How old will {1} be in {4}
    years?; A bus has {2} rows of {3} seats, and {4} seats are empty. How many people sit in the bus?; {0} drives {2}
    kilometers in the morning and {3} times as far in the afternoon. How far is that in {4} days?; {0} bakes {2} trays
    of {3} cookies. {1} eats {4} of them. How many are left? Think step by step.; What is {2}{3} + {3}{4}?; Compute
    {2} * {3} + {4}.; Solve for x: {2}x + {3} = {4}{2}.; What is {2}% of {3}00?; If f(x) = {2}x^2 - {3}x + {4}, what
    is f({2})?; {0} buys a bicycle for {2}{3}0 dollars and sells it at a profit of {4} percent. What is the price?; A
    tank holds {2}0 liters and loses {3} liters an hour. When is it empty?
""")
RIDDLES = _split("""
    A farmer has hens and rabbits, 20 heads and 56 legs. How many of each are there?; Which is heavier, a kilo of
    feathers or a kilo of iron?; If all roses are flowers and some flowers fade quickly, do some roses fade quickly?;
    Three friends stand in a row. Ann is not first, Ben is last. Who stands in the middle?; What comes next: 2, 6, 12,
    20?; Is a tomato a fruit or a vegetable? Explain.; A clock shows 3:15. What is the angle between its hands?; How
    many days are there in seven weeks?; I have two coins that make 30 cents and one is not a nickel. What are they?;
    Hello!; How are you today?; Who are you?; What can you do?; Tell me a joke.; Good morning! Any plans for today?;
    Thank you.
""")
