"The project's address stands in settings.ini, and one command moves it"
import subprocess
import sys

import pytest
from helpers import needs, root

pytestmark = needs('.git', 'docs/address.py')
sys.path.insert(0, str(root/'docs'))

def test_all_addresses_are_that_of_settings():
    from address import texts, user_of, users_in
    found = {path.relative_to(root).as_posix(): users for path,text in texts() if (users := users_in(text))}
    assert {path: users for path,users in found.items() if users!={user_of()}}=={}
    assert len(found)>50

@pytest.mark.slow
def test_the_project_moves(tmp_path):
    from address import texts, user_of, users_in
    there = tmp_path/'there'
    subprocess.run(['git', 'clone', '-q', '--depth', '1', f'file://{root}', there], check=True)
    command = [sys.executable, there/'docs'/'address.py']
    assert 'USER must be the name' in subprocess.run([*command, 'a/b'], capture_output=True, text=True, check=False).stderr
    old = user_of(there)
    subprocess.run([*command, 'somebody-else'], check=True)
    assert user_of(there)=='somebody-else'
    for path,text in texts(there):
        assert users_in(text)<={'somebody-else'}, path
        assert old not in text, path
