//! Damage of a main channel, as a relay reports it.

use hotlift_wire::WireError;
use hotlift_wire::main_channel::EarlyLengths;

use crate::error::{Channel, MigrationError};

/// What is wrong with the bytes of main. For a device whose state a relay cannot take out of a stream with multifd, the
/// error has the way out: without multifd the stream is passed through.
pub(crate) fn broken(error: WireError, early: &EarlyLengths) -> MigrationError {
    let got = match (&error, early.searched()) {
        (WireError::UnknownDevice { idstr, .. }, _) => {
            format!("the state of device '{idstr}', which sends it while the guest runs")
        }
        (WireError::NoSectionEnd { .. } | WireError::SectionLength { .. }, _) => error.to_string(),
        // Its end may have been taken for another place.
        (_, Some(idstr)) => format!("{error}, behind device '{idstr}', whose state has no length"),
        _ => return MigrationError::main_wire(error),
    };
    MigrationError::Protocol {
        channel: Channel::Main,
        got,
        doing: "reading RAM (switch multifd off at both QEMUs, 'hotlift migrate --multifd off', or migrate without the relay)",
    }
}
