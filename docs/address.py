"""Move the project to another address: `python docs/address.py USER` writes the name of the GitHub user or organization wherever it stands

It stands in one place, `user` in settings.ini; links in README, badges, notebooks, docstrings, CITATION.cff and pyproject.toml repeat it.
`tests/project/test_address.py` compares them.
"""
import re, subprocess, sys
from configparser import ConfigParser
from pathlib import Path

root = Path(__file__).resolve().parent.parent
addresses = re.compile(r'github(?:usercontent)?\.com/(?:repos/|github/)?([\w-]+)/fastai_bs\b|([\w-]+)\.github\.io\b')

def user_of(root=root):
    "The user that settings.ini names"
    settings = ConfigParser()
    settings.read(root/'settings.ini')
    return settings['DEFAULT']['user']

def texts(root=root):
    "`(path, text)` of each file under version control that is a text"
    for p in subprocess.run(['git', '-C', root, 'ls-files', '-z'], capture_output=True, text=True, check=True).stdout.split('\0')[:-1]:
        try: yield root/p,(root/p).read_text()
        except UnicodeDecodeError: pass # A picture

def users_in(text):
    "The users in the addresses of this project in a text"
    return {a or b for line in text.splitlines() if 'github' in line for a,b in addresses.findall(line)} # A picture is one long line

def moved(text, old, new):
    "The text with `new` in place of the user `old`"
    return re.sub(rf'(?<![\w-]){re.escape(old)}(?![\w-])', new, text)

def main(new):
    old = user_of()
    for path,text in texts():
        if (there := moved(text, old, new))!=text: path.write_text(there)

if __name__=='__main__':
    if len(sys.argv)!=2 or not re.fullmatch(r'[A-Za-z0-9](?:[A-Za-z0-9-]{0,38})', sys.argv[1]):
        sys.exit(f"USER must be the name of one GitHub user or organization, got {' '.join(sys.argv[1:]) or 'nothing'}: python docs/address.py fastai-bs")
    main(sys.argv[1])
