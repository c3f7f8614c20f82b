//! Phases of a guest, and the migrated state in addition to vCPUs and RAM.

use hotlift::guest::GuestError;

use crate::fill::FillError;
use crate::settings::Program;
use crate::verify::Digest;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The guest has never run, and no state was loaded.
    Fresh,
    /// The guest is paused, and can run.
    Paused,
    /// The guest runs.
    Running,
}

#[derive(Debug)]
pub(crate) struct Life {
    pub phase: Phase,
    pub program: Program,
    pub digest: Digest,
    filled: bool,
}

impl Life {
    pub fn new(program: Program) -> Self {
        let digest = Digest::zero(&program.layout);
        Self {
            phase: Phase::Fresh,
            program,
            digest,
            filled: false,
        }
    }

    pub fn ram_is_fresh(&self) -> bool {
        self.phase == Phase::Fresh && !self.filled
    }

    pub fn begin_fill(&mut self) -> Result<(), FillError> {
        if !self.ram_is_fresh() {
            return Err(FillError::NotFresh);
        }
        self.filled = true;
        Ok(())
    }

    pub fn check_fresh(&self, action: &'static str) -> Result<(), GuestError> {
        match self.phase {
            Phase::Fresh => Ok(()),
            Phase::Paused | Phase::Running => {
                Err(GuestError::new(action, "it was started or loaded already"))
            }
        }
    }

    pub fn check_paused(&self, action: &'static str) -> Result<(), GuestError> {
        match self.phase {
            Phase::Paused => Ok(()),
            Phase::Fresh => Err(GuestError::new(action, "it was neither started nor loaded")),
            Phase::Running => Err(GuestError::new(action, "it is running")),
        }
    }

    pub fn start(&mut self) -> Result<(), GuestError> {
        self.check_fresh("start")?;
        self.phase = Phase::Running;
        Ok(())
    }

    pub fn paused(&mut self) {
        if self.phase == Phase::Running {
            self.phase = Phase::Paused;
        }
    }

    pub fn loaded(&mut self, program: Program, digest: Digest) {
        self.program = program;
        self.digest = digest;
        self.phase = Phase::Paused;
    }

    pub fn resume(&mut self) -> Result<(), GuestError> {
        if self.phase == Phase::Fresh {
            return Err(GuestError::new(
                "resume",
                "it was neither started nor loaded",
            ));
        }
        self.phase = Phase::Running;
        Ok(())
    }
}
