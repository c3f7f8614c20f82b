//! Messages between two Hotlifts on separate connections. A token assigns a connection to a migration; a question asks where
//! the guest of a migration is.
//!
//! ```text
//! token     "HLTK"  token (16)                        opens a connection that a conversation announced, or another
//!                                                     connection of a postcopy, with the migration's id as its token
//! question  "HLQU"  migration (16)  be32 CRC-32       source: where is the guest of this migration?
//! answer    "HLAN"  migration (16)  u8: activity << 4 | outcome  be32 CRC-32
//! confirm   "HLOK"  migration (16)                    source: answer received
//! ```
//!
//! A question uses a new connection to the address of the migration. The answer has a checksum, because it decides where the
//! guest runs.

use crate::{Reader, WireError};

/// Id of a migration. The destination chooses a random id, and sends it in HELLO.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct MigrationId(pub [u8; 16]);

impl std::fmt::Display for MigrationId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// First bytes of a token.
pub const TOKEN_MAGIC: [u8; 4] = *b"HLTK";
/// First bytes of a question.
pub const QUESTION_MAGIC: [u8; 4] = *b"HLQU";
/// First bytes of an answer.
pub const ANSWER_MAGIC: [u8; 4] = *b"HLAN";
const CONFIRMATION_MAGIC: [u8; 4] = *b"HLOK";

/// Length of a token message in bytes, including its magic.
pub const TOKEN_LEN: usize = 20;
/// Length of a question in bytes.
pub const QUESTION_LEN: usize = 24;
/// Length of an answer in bytes.
pub const ANSWER_LEN: usize = 25;
/// Length of the confirmation of an answer in bytes.
pub const CONFIRMATION_LEN: usize = 20;

/// Statement of the destination about the guest of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Outcome {
    /// The destination does not know the migration. This proves nothing about the guest.
    Unknown = 0,
    /// The guest is at the destination.
    Runs = 1,
    /// The guest does not run at the destination and never will. The destination makes sure of this before it answers.
    Never = 2,
    /// Not decided yet: the source must ask again.
    Undecided = 3,
    /// Postcopy: the guest is at the destination, which has received all its pages.
    HasAll = 4,
}

/// State of the guest at the destination, as the relay of the destination's QEMU observes it. A source that does not offer
/// [`Features::GUEST_ACTIVITY`](crate::handshake::Features::GUEST_ACTIVITY) always receives [`GuestActivity::Unknown`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(u8)]
pub enum GuestActivity {
    /// The state is unknown.
    #[default]
    Unknown = 0,
    /// The guest runs.
    Runs = 1,
    /// The guest does not run, and this is correct. For example, it was paused at the source, or has run and has ended since.
    Rests = 2,
    /// The guest does not run, although it ran at the source.
    Stopped = 3,
}

impl GuestActivity {
    /// Decodes a value; `None` if the code is unknown.
    pub(crate) fn of_code(code: u8) -> Option<Self> {
        [Self::Unknown, Self::Runs, Self::Rests, Self::Stopped]
            .into_iter()
            .find(|activity| *activity as u8 == code)
    }
}

/// Encodes the token message that opens a connection.
#[must_use]
pub fn token(token: [u8; 16]) -> [u8; TOKEN_LEN] {
    with_magic(TOKEN_MAGIC, token)
}

/// Decodes a token message; `None` if the bytes do not begin with its magic.
#[must_use]
pub fn read_token(bytes: &[u8; TOKEN_LEN]) -> Option<[u8; 16]> {
    without_magic(TOKEN_MAGIC, bytes)
}

/// Encodes the confirmation that the answer about migration `id` has arrived.
#[must_use]
pub fn confirmation(id: MigrationId) -> [u8; CONFIRMATION_LEN] {
    with_magic(CONFIRMATION_MAGIC, id.0)
}

/// Encodes a question about migration `id`.
#[must_use]
pub fn question(id: MigrationId) -> [u8; QUESTION_LEN] {
    let mut bytes = [0; QUESTION_LEN];
    bytes[..CONFIRMATION_LEN].copy_from_slice(&with_magic(QUESTION_MAGIC, id.0));
    seal(&mut bytes);
    bytes
}

/// Decodes a question. Returns the id of the migration.
///
/// # Errors
/// If the magic or the checksum is wrong.
pub fn read_question(bytes: &[u8; QUESTION_LEN]) -> Result<MigrationId, WireError> {
    let mut reader = opened(bytes, QUESTION_MAGIC, "question about a migration")?;
    Ok(MigrationId(*reader.array("question about a migration")?))
}

/// Encodes the answer about migration `id`: its `outcome`, and the state `activity` of its guest.
#[must_use]
pub fn answer(id: MigrationId, outcome: Outcome, activity: GuestActivity) -> [u8; ANSWER_LEN] {
    let mut bytes = [0; ANSWER_LEN];
    bytes[..CONFIRMATION_LEN].copy_from_slice(&with_magic(ANSWER_MAGIC, id.0));
    bytes[CONFIRMATION_LEN] = outcome as u8 | (activity as u8) << 4;
    seal(&mut bytes);
    bytes
}

/// Decodes the answer to a question about migration `id`.
///
/// # Errors
/// If the answer is about another migration, has an unknown outcome, or a wrong checksum.
pub fn read_answer(
    bytes: &[u8; ANSWER_LEN],
    id: MigrationId,
) -> Result<(Outcome, GuestActivity), WireError> {
    const WHAT: &str = "answer about a migration";
    let mut reader = opened(bytes, ANSWER_MAGIC, WHAT)?;
    if *reader.array(WHAT)? != id.0 {
        return Err(WireError::OutOfOrder {
            got: "an answer about another migration",
            expected: WHAT,
        });
    }
    let code = reader.u8(WHAT)?;
    let outcome = [
        Outcome::Unknown,
        Outcome::Runs,
        Outcome::Never,
        Outcome::Undecided,
        Outcome::HasAll,
    ]
    .into_iter()
    .find(|outcome| *outcome as u8 == code & 0xf);
    outcome
        .zip(GuestActivity::of_code(code >> 4))
        .ok_or(WireError::Unknown {
            what: WHAT,
            got: code.into(),
        })
}

fn with_magic(magic: [u8; 4], id: [u8; 16]) -> [u8; CONFIRMATION_LEN] {
    let mut bytes = [0; CONFIRMATION_LEN];
    bytes[..4].copy_from_slice(&magic);
    bytes[4..].copy_from_slice(&id);
    bytes
}

fn without_magic(magic: [u8; 4], bytes: &[u8; TOKEN_LEN]) -> Option<[u8; 16]> {
    let rest = bytes.strip_prefix(&magic)?;
    rest.try_into().ok()
}

/// Writes the CRC-32 of the preceding bytes into the last four bytes.
fn seal(bytes: &mut [u8]) {
    let end = bytes.len() - 4;
    let crc = crc32fast::hash(&bytes[..end]);
    bytes[end..].copy_from_slice(&crc.to_be_bytes());
}

/// Verifies the CRC-32 and the magic of a message. Returns a reader after the magic.
fn opened<'a>(
    bytes: &'a [u8],
    magic: [u8; 4],
    what: &'static str,
) -> Result<Reader<'a>, WireError> {
    let end = bytes.len() - 4;
    let expected = Reader::new(&bytes[end..]).be32(what)?;
    let got = crc32fast::hash(&bytes[..end]);
    WireError::check_crc(what, expected, got)?;
    let mut reader = Reader::new(&bytes[..end]);
    let begins = reader.be32(what)?;
    if begins != u32::from_be_bytes(magic) {
        return Err(WireError::Mismatch {
            what,
            expected: u32::from_be_bytes(magic).into(),
            got: begins.into(),
        });
    }
    Ok(reader)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: MigrationId = MigrationId(*b"0123456789abcdef");

    #[test]
    fn queries_answers_and_tokens_are_read_as_written() {
        assert_eq!(read_question(&question(ID)).unwrap(), ID);
        for outcome in [
            Outcome::Unknown,
            Outcome::Runs,
            Outcome::Never,
            Outcome::Undecided,
            Outcome::HasAll,
        ] {
            for activity in [
                GuestActivity::Unknown,
                GuestActivity::Runs,
                GuestActivity::Rests,
                GuestActivity::Stopped,
            ] {
                let read = read_answer(&answer(ID, outcome, activity), ID).unwrap();
                assert_eq!(read, (outcome, activity));
            }
        }
        // An older source can also read an answer whose guest state is unknown.
        assert_eq!(
            answer(ID, Outcome::Runs, GuestActivity::Unknown)[CONFIRMATION_LEN],
            1
        );
        assert_eq!(read_token(&token(ID.0)), Some(ID.0));
        assert_eq!(read_token(&confirmation(ID)), None);
    }

    #[test]
    fn an_answer_with_a_flipped_bit_or_of_another_migration_is_ignored() {
        let answer = answer(ID, Outcome::Runs, GuestActivity::Runs);
        for bit in 0..8 * ANSWER_LEN {
            let mut damaged = answer;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(read_answer(&damaged, ID).is_err(), "bit {bit}");
        }
        assert!(read_answer(&answer, MigrationId::default()).is_err());
    }

    #[test]
    fn a_query_with_a_flipped_bit_is_ignored() {
        for bit in 0..8 * QUESTION_LEN {
            let mut damaged = question(ID);
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(read_question(&damaged).is_err(), "bit {bit}");
        }
    }
}
